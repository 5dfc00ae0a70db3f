"""Clip, AdamW step and zeroed gradient over one flat buffer, against torch's fused step and its two passes.

By pieces: torch's passes one after the other on what fits in the cache, as the loop form of the runtime does.
The buffers are made as those of a run are: on Linux in huge pages, where the system gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from benchmarks.kernels.harness import Case
from mpipipe.ops import adamw
from mpipipe.runtime.weights import Flat

N = 25_000_000
PIECE = 1 << 15  # elements
SETTINGS: dict[str, Any] = {"lr": 3e-4, "eps": 1e-8, "weight_decay": 0.1}
BETAS = (0.9, 0.95)
FACTOR = 0.5
STEP = 5
Buffers = list[torch.Tensor]  # param, grad, exp_avg, exp_avg_sq; of bf16 the master too


def cases() -> list[Case]:
    wide = [_flat().normal_(), _flat().normal_(), _flat().normal_(), _flat().uniform_()]
    narrow = [_flat(torch.bfloat16).normal_() for _ in range(2)]
    half = [*narrow, _flat().normal_(), _flat().uniform_(), _flat().normal_()]
    own = _flat()  # the gradient in float32
    return [
        *_of("float32", wide, 1.3, {"scaled": _scaled, "mul": _fused}),
        *_of("bfloat16 with master", half, 2.0, {"copies": partial(_with_master, own)}),
    ]


def _flat(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(N,); a buffer ends where the next parameter of its dtype would begin."""
    return Flat.like({"": torch.Size([N])}, dtype).buffer[:N]


def _of(name: str, buffers: Buffers, bar: float, ways: dict[str, Callable[[Buffers], None]]) -> list[Case]:
    flat = {way: partial(f, buffers) for way, f in ways.items()}
    pieces = list(zip(*(b.split(PIECE) for b in buffers), strict=True))
    by_pieces = {f"{way}, by pieces": partial(_each, f, pieces) for way, f in ways.items()}
    moved = 2 * sum(b.nbytes for b in buffers)
    ours = partial(_ours, *buffers)
    return [
        Case("adamw", f"{name}, flat", ours, flat, bar, moved, 0.0),
        Case("adamw", f"{name}, by pieces", ours, by_pieces, None, moved, 0.0),
    ]


def _ours(
    param: torch.Tensor, grad: torch.Tensor, first: torch.Tensor, second: torch.Tensor,
    master: torch.Tensor | None = None,
) -> None:  # fmt: skip
    how: dict[str, Any] = SETTINGS | {"betas": BETAS, "step": STEP, "factor": FACTOR, "master": master}
    adamw(param, grad, first, second, **how)


def _each(f: Callable[[Any], None], pieces: list[Any]) -> None:
    for piece in pieces:
        f(piece)


def _fused(b: Buffers) -> None:
    b[1].mul_(FACTOR)
    _step(b[0], b[1], b[2], b[3])
    b[1].zero_()


def _scaled(b: Buffers) -> None:
    _step(b[0], b[1], b[2], b[3], grad_scale=_number(1 / FACTOR, b[0].device))
    b[1].zero_()


def _with_master(own: torch.Tensor, b: Buffers) -> None:
    grad = own[: len(b[1])]
    grad.copy_(b[1])
    _step(b[4], grad, b[2], b[3], grad_scale=_number(1 / FACTOR, b[0].device))
    b[0].copy_(b[4])
    b[1].zero_()


@cache
def _number(value: float, device: torch.device) -> torch.Tensor:
    """Kept, as an optimizer keeps it: to a GPU it is a copy of its own."""
    return torch.tensor(value, device=device)


def _step(
    param: torch.Tensor, grad: torch.Tensor, first: torch.Tensor, second: torch.Tensor, **scale: torch.Tensor
) -> None:
    step = _number(float(STEP), param.device)
    torch._fused_adamw_(
        [param], [grad], [first], [second], [], [step], beta1=BETAS[0], beta2=BETAS[1], amsgrad=False,
        maximize=False, **SETTINGS, **scale,
    )  # fmt: skip
