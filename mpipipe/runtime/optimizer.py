"""The only owner of updates: clip, learning rate, AdamW and SGD over the flat buffers of a stage.

    STEP = norm of each parameter -> gathered in canonical order -> clip coefficient -> update

What a run is given (`Optimizer`) makes an `Updater` for the weights of each stage: the built-in one
here, or that of a torch optimizer (`foreign.py`).

With the bits of torch, norms and updates run parameter by parameter with its own single-tensor code: a
vectorised kernel may round the tail of a buffer differently from its body, so bits would depend on where
a parameter lies if whole buffers were updated at once (`updates.py`).

With fast bits, a float32 buffer is clipped, stepped and zeroed in one pass of our kernel, for which it is
of no concern where an element lies; so any cut gives the same bits here too, but not those of torch.
SGD, other dtypes and a package without kernels keep torch's form.

AdamW: Loshchilov and Hutter 2019. Clipping as torch.nn.utils.clip_grad_norm_ (Pascanu et al. 2013).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mpipipe import ops
from mpipipe.errors import CheckpointError
from mpipipe.runtime.setting import kernel_set
from mpipipe.runtime.updates import Chunk, adamw, chunks, sgd
from mpipipe.runtime.weights import Flat, ParamGroup, StageWeights
from mpipipe.values import TensorSpec

Bits = Literal["torch", "fast"]
LISTED = 10  # names in an error; the rest is counted


class Updater(Protocol):
    """Updates the weights of one stage and keeps what it needs for that."""

    @property
    def kind(self) -> str:
        """Which optimizer it is; empty where the stage has nothing to train."""
        ...

    def update(self, step: int, factor: float | None) -> None:
        """Scales the gradients by `factor`, updates the weights and zeroes the gradients."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, as "parameter/name": the tensors themselves, not copies."""
        ...

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the tensors: plain JSON under keys that begin with the name of a
        parameter of the stage. Raises CheckpointError for what it cannot keep."""
        ...

    def load(self, saved: Saved, optimizer: Mapping[str, Any]) -> None:
        """Takes up the state that was saved; optimizer: as `described` then.

        Raises CheckpointError where it is of another optimizer, or has more or fewer names.
        """
        ...


class Saved(Protocol):
    """Tensors on disk, by name."""

    @property
    def folder(self) -> Path: ...

    @property
    def names(self) -> Collection[str]: ...

    def spec(self, name: str) -> TensorSpec: ...

    def read(self, name: str, out: Tensor) -> None: ...


class Optimizer(Protocol):
    """What a run knows of its optimizer before there is a weight."""

    @property
    def clip(self) -> float | None: ...

    @property
    def state_buffers(self) -> int:
        """Buffers of the size of the weights that it keeps."""
        ...

    def lr_at(self, step: int) -> float | None:
        """The learning rate of a step; None where only the optimizer itself knows."""
        ...

    def attach(self, weights: StageWeights) -> Updater: ...


@dataclass(frozen=True)
class OptimizerSettings:
    """The built-in optimizers; the defaults are those of the configuration, at a constant rate.

    bits: `Numerics.bits` of the run."""

    kind: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.1
    warmup: int = 0
    min_lr_ratio: float = 1.0
    steps: int | None = None  # until the rate is at its end; None: it stays
    clip: float | None = 1.0
    bits: Bits = "torch"

    @property
    def state_buffers(self) -> int:
        """Buffers of the size of the weights that the optimizer keeps."""
        return 2 if self.kind == "adamw" else int(self.momentum > 0)

    @property
    def by_kernel(self) -> bool:
        """Whether one kernel clips, updates and zeroes weights in fp32."""
        return self.bits == "fast" and self.kind == "adamw" and kernel_set() != "none"

    def lr_at(self, step: int) -> float:
        """Linear warm-up over `warmup` steps, then a cosine down to `min_lr_ratio * lr` at the end."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, (self.steps or 1) - self.warmup)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * cosine)

    def attach(self, weights: StageWeights) -> Updater:
        return FlatUpdater(weights.own_groups, self)


@torch.no_grad()
def norms(grads: Iterable[Flat], bits: Bits = "torch") -> dict[str, float]:
    """2-norm of each gradient in these buffers, rounded as torch rounds it."""
    return {name: norm for flat in grads for name, norm in _flat_norms(flat, bits).items()}


def _flat_norms(flat: Flat, bits: Bits) -> dict[str, float]:
    if bits == "torch" or flat.buffer.is_complex():  # for which we have no kernel
        return {name: float(torch.linalg.vector_norm(g)) for name, g in flat.views.items()}
    views = flat.views.values()
    offsets, counts = (
        torch.tensor(n) for n in ([v.storage_offset() for v in views], [v.numel() for v in views])
    )
    return dict(zip(flat.views, ops.norms(flat.buffer, offsets, counts).float().tolist(), strict=True))


def clip_coefficient(
    all_norms: list[float], clip: float, dtype: torch.dtype = torch.float32
) -> tuple[float, float]:
    """(total norm, factor of all gradients); `all_norms` in canonical order; dtype: `total_dtype` of the
    gradients."""
    total = torch.linalg.vector_norm(torch.tensor(all_norms, dtype=dtype))
    factor = torch.clamp(clip / (total + 1e-6), max=1.0)
    return float(total), float(factor)


def total_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """In which torch combines the norms of gradients of these: bf16 where all of them are."""
    return reduce(torch.promote_types, (torch.empty(0, dtype=dtype).abs().dtype for dtype in dtypes))


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which a gradient is multiplied by the factor, which need not be one of its own dtype."""
    return total_dtype([dtype, torch.float32])


class FlatUpdater:
    """AdamW or SGD over flat buffers: one more buffer of the same form per state."""

    def __init__(self, groups: list[ParamGroup], settings: OptimizerSettings) -> None:
        self.groups, self.settings, self.kind = groups, settings, settings.kind
        names = ("exp_avg", "exp_avg_sq") if settings.kind == "adamw" else ("momentum_buffer",)
        self.names = names[: settings.state_buffers]
        self.buffers = [[group.data.sibling() for _ in self.names] for group in groups]
        self._chunks = [chunks(g.data, g.grad, *s) for g, s in zip(groups, self.buffers, strict=True)]

    @torch.no_grad()
    def update(self, step: int, factor: float | None) -> None:
        for group, state, places in zip(self.groups, self.buffers, self._chunks, strict=True):
            if self.settings.by_kernel and group.data.buffer.dtype == torch.float32:
                self._update_at_once(group, state, step, 1.0 if factor is None else factor)
                continue
            if factor is not None:
                group.grad.buffer.mul_(torch.tensor(factor, dtype=factor_dtype(group.grad.buffer.dtype)))
            self._update_group(group, places, step)
            group.grad.buffer.zero_()

    def _update_at_once(self, group: ParamGroup, flats: list[Flat], step: int, factor: float) -> None:
        settings = self.settings
        ops.adamw(
            *(flat.buffer for flat in (group.data, group.grad, *flats)), step=step + 1, factor=factor,
            lr=settings.lr_at(step), betas=settings.betas, eps=settings.eps,
            weight_decay=settings.weight_decay if group.decay else 0.0,
        )  # fmt: skip

    def _update_group(self, group: ParamGroup, places: Sequence[Chunk], step: int) -> None:
        settings, lr = self.settings, self.settings.lr_at(step)
        decay = settings.weight_decay if group.decay else 0.0
        for chunk in places:
            if settings.kind == "adamw":
                adamw(chunk, step + 1, lr=lr, betas=settings.betas, eps=settings.eps, weight_decay=decay)
            else:
                sgd(chunk, lr=lr, momentum=settings.momentum, weight_decay=decay)

    def state(self) -> dict[str, Tensor]:
        return {
            f"{name}/{kind}": view
            for flats in self.buffers
            for kind, flat in zip(self.names, flats, strict=True)
            for name, view in flat.views.items()
        }

    def numbers(self) -> dict[str, Any]:
        return {}

    def load(self, saved: Saved, optimizer: Mapping[str, Any]) -> None:
        state = self.state()
        params = {name for group in self.groups for name in group.data.views}
        check_fits(saved, optimizer, self.kind, params, state.keys())
        for name, view in state.items():
            saved.read(name, view)


# -- what a checkpoint says of the optimizer -----------------------------------------------------------


def described(parts: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """{"kind", "numbers"} of the whole optimizer, from those of every stage's updater on every rank.

    Raises CheckpointError when the stages have different ones.
    """
    parts = list(parts)
    kinds = sorted({kind for kind, _ in parts if kind})
    if len(kinds) > 1:
        raise CheckpointError(
            f"the optimizer factory makes {kinds[0]} for some stages and {kinds[1]} for others, and cuts may "
            "change; make the same one for any list of parameters"
        )
    return {"kind": "".join(kinds), "numbers": {k: v for _, numbers in parts for k, v in numbers.items()}}


def check_trained(saved: Saved, optimizer: Mapping[str, Any], trained: Collection[str]) -> None:
    """Raises CheckpointError when there is state of parameters that are not among the `trained` of the whole
    model: no stage would take it up."""
    found = {name.rpartition("/")[0] for name in [*saved.names, *optimizer["numbers"]]}
    if left := sorted(found - set(trained)):
        raise CheckpointError(
            f"{saved.folder}: has optimizer state of parameters that are not trained now: {_listed(left)}\n"
            "  resume with the model that it was saved with"
        )


def check_fits(
    saved: Saved, optimizer: Mapping[str, Any], kind: str, params: Collection[str], wanted: Collection[str]
) -> None:
    """Raises CheckpointError unless the checkpoint is of an optimizer of this `kind` and its state of the
    parameters `params` has the names `wanted`, as "parameter/name"."""
    if optimizer["kind"] != kind:
        raise CheckpointError(
            f"{saved.folder}: was saved with the optimizer {optimizer['kind'] or 'of no parameter'!r}, this "
            f"run has {kind!r}; resume with the optimizer that it was saved with"
        )
    numbers = [name for name, value in optimizer["numbers"].items() if not isinstance(value, dict)]
    found = {name for name in [*saved.names, *numbers] if name.rpartition("/")[0] in params}
    misfits = {"missing on disk": set(wanted) - found, "unknown to it": found - set(wanted)}
    lines = [f"\n  {len(names)} {what}: {_listed(sorted(names))}" for what, names in misfits.items() if names]
    if lines:
        raise CheckpointError(
            f"{saved.folder}: its state does not fit the optimizer {kind!r}{''.join(lines)}\n"
            "  resume with the optimizer and the settings that it was saved with"
        )


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + rest
