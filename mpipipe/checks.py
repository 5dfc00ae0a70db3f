"""What is refused before the first weight is made, with the next move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mpipipe.cluster.agree import agree
from mpipipe.cluster.comm import Communicator
from mpipipe.data.base import SAME_DATA, Dataset, fingerprint
from mpipipe.errors import CaptureError, MpipipeError
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.ops import device
from mpipipe.planner.asked import Replicas
from mpipipe.state.digests import tensor_digest, weights_sha256
from mpipipe.values import RECOMPUTE

CHOICES = {
    "precision": ("fp32", "bf16"), "tied": ("per_use", "eager"), "gemm": ("auto", "mkl", "onednn"),
    "unused": ("error", "keep"), "bits": ("torch", "fast"), "recover": ("restart", "mpi"),
    "recompute": ("auto", *RECOMPUTE), "reduce": ("exact", "fast"),
}  # fmt: skip


def check_shape(receive_window: int, replicas: Replicas) -> None:
    if replicas == ():
        raise MpipipeError("replicas = (): give a number, or one for each stage")
    of_stages = replicas if isinstance(replicas, tuple) else () if replicas == "auto" else (replicas,)
    for name, counts in {"receive_window": (receive_window,), "replicas": of_stages}.items():
        for count in counts:
            if count < 1:
                raise MpipipeError(f"{name} = {count}; must be at least 1")


def check_counts(
    batch: int, micro_batches: int | Literal["auto"], blocks: int, reduce: Literal["exact", "fast"]
) -> None:
    if reduce == "fast" and blocks != 1:
        raise MpipipeError(f"reduce = 'fast' adds up in no blocks, but blocks = {blocks}; leave it out")
    if micro_batches == "auto":
        return
    if not 1 <= micro_batches <= batch:
        raise MpipipeError(
            f"micro_batches = {micro_batches} for batch = {batch}; a micro-batch needs a sample: give 1 at "
            "least, and as many as samples at most"
        )
    if blocks < 1 or micro_batches % blocks:
        raise MpipipeError(f"blocks = {blocks} does not divide micro_batches = {micro_batches}; change one")


def check_metrics(names: Sequence[str]) -> None:
    if "loss" in names:
        raise MpipipeError("a metric is called 'loss', as the loss is in every evaluation; rename it")


def check_choices(**given: str) -> None:
    """given: as `CHOICES` calls it."""
    for name, value in given.items():
        if value not in CHOICES[name]:
            raise MpipipeError(f"{name} = {value!r}; expected one of {', '.join(map(repr, CHOICES[name]))}")


def check_kernels(kernels: bool, bits: str) -> None:
    if not kernels and bits == "fast":
        raise MpipipeError(
            "kernels = False, and bits = 'fast', which are those of the compiled kernels; give bits='torch', "
            "or leave kernels out"
        )


def check_given(comm: Communicator, source: ModelSource) -> None:
    """A model that each rank made for itself must be one and the same. Collective."""
    digests = comm.allgather_object(weights_sha256([tensor_digest(n, t) for n, t in source.given.items()]))
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise MpipipeError(
            f"the model of rank {other} has other values than that of rank 0 (sha256 {digests[other][:8]} "
            f"and {digests[0][:8]}); call torch.manual_seed before it is made, or give the function that "
            "makes it"
        )


def check_samples(comm: Communicator, data: Dataset, rows: int) -> None:
    """Data that each rank made for itself must be one and the same. Collective."""
    if data.exact:
        agree(comm, {"the first samples": fingerprint(data, rows)}, SAME_DATA)


def check_trained(variants: Variants, unused: str) -> None:
    if not variants.trained:
        raise MpipipeError(
            "no parameter gets a gradient: the loss depends on none, or all are frozen; "
            "unfreeze some with requires_grad_(True)"
        )
    left = variants.unused
    if left and unused == "error":
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        raise MpipipeError(
            f"the loss does not depend on {', '.join(map(repr, left[:5]))}{more}: no stage uses them, so "
            "they would stay as they are; freeze them with requires_grad_(False), use them, or set "
            "train.unused to keep"
        )


def note_of_modes(source: ModelSource) -> str:
    """What to say of parts that are in eval mode while the model is not, which may have been forgotten."""
    left = [path for path in source.in_eval if path.rpartition(".")[0] not in source.in_eval]
    if not left:
        return ""
    more = f" and {len(left) - 5} more" if len(left) > 5 else ""
    return (
        f"in eval mode in training, as in the model that was given: {', '.join(map(repr, left[:5]))}{more}; "
        "call model.train() before, where that is not meant"
    )


def check_device(variants: Variants) -> None:
    """Raises CaptureError for layers that run as they are written, on an accelerator: they make tensors of
    their own, in main memory, and draw from torch's generator there."""
    if variants.primary.captured.by_layer and not device.on_host():
        raise CaptureError(
            f"pipeline.device = {device.here().type}: the layers of this model cannot be traced and run as "
            "they are written, which they do on processors only; set pipeline.device=cpu, or give a model "
            "that can be traced"
        )
