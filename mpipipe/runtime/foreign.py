"""A torch optimizer of the user's own over the weights of one stage.

The factory is called once per stage, with the named parameters that the stage owns. Any optimizer
that updates each parameter from its own gradient alone (AdamW, SGD, Adafactor, Lion, ...) gives the same
bits for every cut; one that mixes parameters (LBFGS) cannot be cut and is not supported.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer
from torch.optim.lr_scheduler import LRScheduler

from mpipipe.errors import MpipipeError
from mpipipe.runtime.optimizer import Saved, Updater
from mpipipe.runtime.weights import StageWeights

Made = TorchOptimizer | tuple[TorchOptimizer, LRScheduler]
Factory = Callable[[list[tuple[str, nn.Parameter]]], Made]


@dataclass(frozen=True)
class UserOptimizer:
    """factory(named parameters) -> optimizer, or (optimizer, scheduler); the scheduler steps once per step.

    Planned for as if it kept two buffers per parameter, like AdamW.
    """

    factory: Factory
    clip: float | None = None
    state_buffers: int = 2

    def lr_at(self, step: int) -> float | None:
        return None

    def attach(self, weights: StageWeights) -> Updater:
        return ForeignUpdater(self.factory, weights)


class ForeignUpdater:
    def __init__(self, factory: Factory, weights: StageWeights) -> None:
        self.params: dict[str, nn.Parameter] = {}
        for name, grad in weights.grad.items():
            self.params[name] = nn.Parameter(weights.data[name])  # shares the memory of the flat buffer
            self.params[name].grad = grad
        self.optimizer: TorchOptimizer | None = None
        self.scheduler: LRScheduler | None = None
        if self.params:  # torch refuses an empty list
            made = self._make(factory)
            self.optimizer, self.scheduler = made if isinstance(made, tuple) else (made, None)
            self._check(self.optimizer)

    def _make(self, factory: Factory) -> Made:
        try:
            return factory(list(self.params.items()))
        except ValueError as error:
            if twice := self._twice(error):
                raise MpipipeError(
                    f"the optimizer factory puts {twice[0]!r} into two parameter groups "
                    f"({len(twice)} parameters in all); make the groups disjoint"
                ) from error
            raise

    def _twice(self, error: ValueError) -> list[str]:
        """The parameters that torch has just refused as already in a group, from its own variables."""
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        seen = frame.tb_frame.f_locals if frame is not None else {}
        group = seen.get("param_group")
        before: Any = seen.get("param_set", ())
        new = group["params"] if isinstance(group, dict) else []
        doubled = {id(p) for p in new if any(p is q for q in before)}
        doubled |= {id(p) for i, p in enumerate(new) if any(p is q for q in new[:i])}
        return [name for name, p in self.params.items() if id(p) in doubled]

    def _check(self, optimizer: TorchOptimizer) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        left = [name for name, p in self.params.items() if id(p) not in held]
        if left:
            raise MpipipeError(
                f"the optimizer factory leaves out {left[0]!r} ({len(left)} parameters in all); give every "
                "parameter to a group, or freeze it in the model with requires_grad_(False)"
            )
        foreign = held - {id(p) for p in self.params.values()}
        if foreign:
            raise MpipipeError(
                f"the optimizer factory holds {len(foreign)} parameters that it was not given; use the named "
                "parameters it is called with, not those of a model of your own"
            )

    @torch.no_grad()
    def update(self, step: int, factor: float | None) -> None:
        if self.optimizer is None:
            return
        if factor is not None:
            scale = torch.tensor(factor, dtype=torch.float32)
            for p in self.params.values():
                assert p.grad is not None
                p.grad.mul_(scale)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    @property
    def lr(self) -> float | None:
        return None if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])

    def state(self) -> dict[str, Tensor]:
        """Without the scheduler's: it follows from the number of steps."""
        if self.optimizer is None:
            return {}
        return {
            f"{name}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
            for name, p in self.params.items()
            for key, value in self.optimizer.state[p].items()
            if isinstance(value, (Tensor, int, float))
        }

    def load(self, saved: Saved, step: int) -> None:
        if self.optimizer is None:
            return
        for name, p in self.params.items():
            for full in (n for n in saved.names if n.rpartition("/")[0] == name):
                spec = saved.spec(full)
                value = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
                saved.read(full, value)
                self.optimizer.state[p][full.rpartition("/")[2]] = value
        if self.scheduler is not None:
            with warnings.catch_warnings():  # that the optimizer has not stepped yet: it has, before the save
                warnings.simplefilter("ignore", UserWarning)
                for _ in range(step):
                    self.scheduler.step()
