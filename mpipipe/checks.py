"""What is refused before the first weight is made, with the next move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from math import inf
from numbers import Integral
from typing import Any, Literal

from mpipipe.cluster.agree import agree
from mpipipe.cluster.calls import Limit
from mpipipe.cluster.comm import Communicator
from mpipipe.data.base import SAME_DATA, Dataset, fingerprint
from mpipipe.errors import MpipipeError, did_you_mean, nearest
from mpipipe.graph.rewrite import schema_name, source_line
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.planner.asked import Replicas
from mpipipe.state.digests import tensor_digest, weights_sha256
from mpipipe.values import MOST_RECEIVES, RECOMPUTE

CHOICES = {
    "precision": ("fp32", "bf16"), "tied": ("per_use", "eager"), "gemm": ("auto", "mkl", "onednn"),
    "unused": ("error", "keep"), "bits": ("torch", "fast"), "recover": ("restart", "mpi"),
    "recompute": ("auto", *RECOMPUTE), "reduce": ("exact", "fast"), "bind": ("auto", "none"),
}  # fmt: skip
# The least and the most, of whole numbers that are not just 1 at least.
LIMITS: dict[str, tuple[int, float]] = {
    "mirror_every": (0, inf), "receive_window": (1, MOST_RECEIVES), "seed": (0, 2**63 - 1),
}  # fmt: skip
SAME_BITS = ("mpipipe::dropout", "mpipipe::embedding")  # with kernels and without, on any processor


def check_replicas(replicas: Replicas) -> None:
    if replicas == ():
        raise MpipipeError("replicas = (): give a number, or one for each stage")
    of_stages = replicas if isinstance(replicas, tuple) else () if replicas == "auto" else (replicas,)
    if not all(isinstance(count, int) for count in of_stages):
        raise MpipipeError(f"replicas = {replicas!r}; give a number, one for each, as (3, 2), or 'auto'")
    for count in of_stages:
        if count < 1:
            raise MpipipeError(f"replicas = {count}; must be at least 1")


def check_whole(*others: str | None, **given: Any) -> None:
    """given: whole numbers, as `Pipeline` calls them; others: what each may be instead."""
    for name, value in given.items():
        if value in others:
            continue
        least, most = LIMITS.get(name, (1, inf))
        if not isinstance(value, Integral) or not least <= int(value) <= most:
            between = f"{least} at least" if most == inf else f"from {least} to {most}"
            raise MpipipeError(f"{name} = {value!r}; give a whole number, {between}")


def check_arguments(called: str, init: Callable[..., object], /, *args: object, **given: object) -> None:
    """Raises MpipipeError for arguments that `init`, of the class `called` so, lacks or does not have."""
    known = signature(init)
    names = [name for name in known.parameters if name != "self"]
    for name in given:
        if name not in names:
            raise MpipipeError(f"{called} has no argument {name!r}{did_you_mean(nearest(name, names))}")
    try:
        known.bind(*args, **given)
    except TypeError as error:
        raise MpipipeError(f"{called}: {error}") from None


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


def check_max_ranks(max_ranks: int | None, blocks: int | Literal["auto"]) -> None:
    if max_ranks is not None and blocks != "auto":
        raise MpipipeError(
            f"max_ranks = {max_ranks} is what blocks='auto' goes by, but blocks = {blocks}; set it to "
            "'auto', or leave max_ranks out"
        )


def check_metrics(names: Sequence[str]) -> None:
    if "loss" in names:
        raise MpipipeError("a metric is called 'loss', as the loss is in every evaluation; rename it")


def check_choices(**given: str) -> None:
    """given: as `CHOICES` calls it."""
    for name, value in given.items():
        if value not in CHOICES[name]:
            expected, meant = ", ".join(map(repr, CHOICES[name])), nearest(str(value), CHOICES[name])
            raise MpipipeError(f"{name} = {value!r}; expected one of {expected}{did_you_mean(meant)}")


def check_limit(watchdog: Limit) -> None:
    if watchdog in ("auto", "off") or (isinstance(watchdog, float | int) and watchdog > 0):
        return
    raise MpipipeError(f"watchdog = {watchdog!r}; give seconds, above 0, or 'auto' or 'off'")


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


def check_samples(comm: Communicator, data: Dataset, rows: int) -> dict[str, Any]:
    """Data that each rank made for itself must be one and the same. What a resume knows them by, as of
    `RunState`: of a plain iterable, nothing. Collective."""
    if not data.exact:
        return {}
    first = fingerprint(data, rows)
    agree(comm, {"the first samples": first}, SAME_DATA)
    samples = data.train_samples  # of a user's data set perhaps one of numpy's integers
    return {"samples": None if samples is None else int(samples), "first_sha256": first}


def check_trained(variants: Variants, unused: str) -> None:
    if not variants.trained:
        raise MpipipeError(
            "no parameter gets a gradient: the loss depends on none, or all are frozen; "
            "unfreeze some with requires_grad_(True)"
        )
    left = variants.unused
    if left and unused == "error":
        raise MpipipeError(
            f"the loss does not depend on {_some(left)}: no stage uses them, so they would stay as they are; "
            "freeze them with requires_grad_(False), use them, or set train.unused to keep"
        )


def check_named(variants: Variants, bits: str) -> None:
    """Kernels that a model calls by their names have bits of their own, which go by the instruction set. One
    that has those of torch is not there without them, and then the graph is another one."""
    if bits != "torch":
        return
    for node in variants.primary.order:
        name = schema_name(node)
        if name.startswith("mpipipe::") and name not in SAME_BITS:
            raise MpipipeError(
                f"{source_line(node)}\n  calls {name}, a kernel by its name, and bits = torch has those of "
                "PyTorch: set train.bits=fast (in a script bits='fast'), which records kernels, "
                "or kernels: off (kernels=False), or call torch's function"
            )


def notes_of_parts(source: ModelSource, written: Mapping[str, str]) -> list[str]:
    """What to say of parts that may not be as they were meant.

    They are in eval mode while the model is not; or they run as they are written (part -> why), and so are
    neither cut inside nor computed by kernels."""
    left = [path for path in source.in_eval if path.rpartition(".")[0] not in source.in_eval]
    notes = []
    if left:
        notes.append(
            f"in eval mode in training, as in the model that was given: {_some(left)}; call model.train() "
            "before, where that is not meant"
        )
    for why in dict.fromkeys(written.values()):
        parts = [part.removeprefix("model.") for part, of in written.items() if of == why]
        notes.append(f"as it cannot be captured, this runs as it is written: {_some(parts)}; see {why}")
    return notes


def notes_of_keys(variants: Variants) -> list[str]:
    """What to say of keys of a batch that neither the model nor the loss reads."""
    unread = [key for key in variants.first if key not in variants.read]
    if not unread:
        return []
    return [
        f"training does not read {_some(unread)} of the data; where it should, give the model's forward a "
        "parameter of that name, or read it from the batch in the loss"
    ]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more
