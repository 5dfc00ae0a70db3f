"""The only owner of updates: clip, learning rate, AdamW and SGD over the flat buffers of a stage.

    STEP = norm of each parameter -> gathered in canonical order -> clip coefficient -> update

Norms and updates run parameter by parameter with torch's own single-tensor code: a vectorised
kernel may round the tail of a buffer differently from its body, so bits would depend on where a
parameter lies if whole buffers were updated at once. An update goes over a parameter in pieces that
stay in cache: the same bits (a piece is whole vectors, but for the parameter's own tail), two to
three times as fast, and torch's two temporaries are small.

AdamW: Loshchilov and Hutter 2019. Clipping as torch.nn.utils.clip_grad_norm_ (Pascanu et al. 2013).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from mpipipe.runtime.weights import Flat, ParamGroup, StageWeights

PIECE = 1 << 17  # elements


@dataclass(frozen=True)
class OptimizerSettings:
    kind: Literal["adamw", "sgd"]
    lr: float
    betas: tuple[float, float]
    eps: float
    momentum: float
    weight_decay: float
    warmup: int
    min_lr_ratio: float
    steps: int
    clip: float | None

    @property
    def state_buffers(self) -> int:
        """Buffers of the size of the weights that the optimizer keeps."""
        return 2 if self.kind == "adamw" else int(self.momentum > 0)

    def lr_at(self, step: int) -> float:
        """Linear warm-up over `warmup` steps, then a cosine down to `min_lr_ratio * lr` at the end."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * cosine)


def add_state(groups: list[ParamGroup], settings: OptimizerSettings) -> None:
    for group in groups:
        group.state = [group.data.sibling() for _ in range(settings.state_buffers)]


@torch.no_grad()
def norms(weights: StageWeights) -> dict[str, float]:
    """2-norm of the gradient of each owned, trained parameter, rounded as torch rounds it."""
    return {name: float(torch.linalg.vector_norm(g)) for name, g in weights.grad.items()}


def clip_coefficient(all_norms: list[float], clip: float) -> tuple[float, float]:
    """(total norm, factor of all gradients); `all_norms` in canonical order."""
    total = torch.linalg.vector_norm(torch.tensor(all_norms, dtype=torch.float32))
    factor = torch.clamp(clip / (total + 1e-6), max=1.0)
    return float(total), float(factor)


@torch.no_grad()
def update(groups: list[ParamGroup], settings: OptimizerSettings, step: int, factor: float | None) -> None:
    """Scales the gradients by `factor` and updates the weights; the gradients are left to be zeroed."""
    lr = settings.lr_at(step)
    for group in groups:
        if factor is not None:
            group.grad.buffer.mul_(torch.tensor(factor, dtype=torch.float32))
        _update_group(group, settings, lr)


def _update_group(group: ParamGroup, settings: OptimizerSettings, lr: float) -> None:
    params, grads, *state = (_pieces(flat) for flat in (group.data, group.grad, *group.state))
    decay = settings.weight_decay if group.decay else 0.0
    if settings.kind == "adamw":
        steps = [torch.tensor(float(group.updates)) for _ in params]  # torch counts each up in place
        adamw(
            params, grads, state[0], state[1], [], steps,
            foreach=False, fused=False, capturable=False, differentiable=False, has_complex=False,
            beta1=settings.betas[0], beta2=settings.betas[1], lr=lr, weight_decay=decay, eps=settings.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip
    else:
        momentum: list[Tensor | None] = list(state[0]) if state else [None] * len(params)
        sgd(
            params, grads, momentum, foreach=False, fused=False, weight_decay=decay,
            momentum=settings.momentum, lr=lr, dampening=0.0, nesterov=False, maximize=False,
        )  # fmt: skip
    group.updates += 1


def _pieces(flat: Flat) -> list[Tensor]:
    return [piece for view in flat.views.values() for piece in view.view(-1).split(PIECE)]
