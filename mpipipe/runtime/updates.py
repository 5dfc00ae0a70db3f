"""AdamW and SGD in the order of operations of torch's single-tensor code, over lists of tensors.

torch.optim goes through its Python once per parameter: 60 us each, where the arithmetic of a small one
takes 2. Here every operation goes over a list at once (`torch._foreach_*`, which on a CPU is a loop in
C++ over the same kernels), so that the bits are those of torch. A list holds so little that it stays in
cache from one operation to the next: two to three times as fast for large parameters, and the
temporaries are small.

AdamW: Loshchilov and Hutter 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpipipe.runtime.weights import Flat

PIECE = 1 << 17  # elements: with gradient, state and a temporary they fit into the cache of a core
PIECE_OFF_HOST = 1 << 24  # whose temporary is small beside a GPU's memory
Chunk = list[list[Tensor]]  # of the weights, the gradients and each state: views of the same places


def chunks(*flats: Flat) -> list[Chunk]:
    """Places of flat buffers of one form: as many whole parameters as come to at most `PIECE` elements,
    or a piece of a larger one (whole vectors, so that none is rounded as a tail that was none before). On an
    accelerator, where each call costs more than such a piece, larger ones."""
    most = PIECE if flats[0].buffer.is_cpu else PIECE_OFF_HOST
    by_flat = [[piece for view in flat.views.values() for piece in view.view(-1).split(most)]
               for flat in flats]  # fmt: skip
    found: list[Chunk] = []
    size = 0
    for place in zip(*by_flat, strict=True):
        if not found or size + place[0].numel() > most:
            found.append([[] for _ in flats])
            size = 0
        for same, piece in zip(found[-1], place, strict=True):
            same.append(piece)
        size += place[0].numel()
    return found


def _reals(tensors: list[Tensor]) -> list[Tensor]:
    """A complex number as two, each of which has its own square."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]


def adamw(
    chunk: Chunk, step: int, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    """One update of a chunk [weights, gradients, exp_avg, exp_avg_sq]; step: 1 for the first."""
    weights, grads, mean, square = map(_reals, chunk)
    if weight_decay:
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
    torch._foreach_lerp_(mean, grads, 1 - betas[0])
    torch._foreach_mul_(square, betas[1])
    torch._foreach_addcmul_(square, grads, grads, 1 - betas[1])
    below = torch._foreach_sqrt(square)
    torch._foreach_div_(below, (1 - betas[1] ** step) ** 0.5)
    torch._foreach_add_(below, eps)
    torch._foreach_addcdiv_(weights, mean, below, -lr / (1 - betas[0] ** step))


def sgd(chunk: Chunk, *, lr: float, momentum: float, weight_decay: float) -> None:
    """One update of a chunk [weights, gradients], or [weights, gradients, momentum_buffer]."""
    weights, grads, *buffers = chunk
    if weight_decay:
        grads = list(torch._foreach_add(grads, weights, alpha=weight_decay))
    for buffer in buffers:
        torch._foreach_mul_(buffer, momentum)
        torch._foreach_add_(buffer, grads)
        grads = buffer
    torch._foreach_add_(weights, grads, alpha=-lr)
