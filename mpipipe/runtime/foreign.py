"""A torch optimizer of the user's own over the weights of one stage.

The factory is called once per stage and rank, with the named parameters that the rank updates. Any optimizer
that updates each parameter from its own gradient alone (AdamW, SGD, Adafactor, Lion, ...) gives the same
bits for every cut; one that mixes parameters (LBFGS) cannot be cut and is not supported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mpipipe.config.sections import TrainConfig
from mpipipe.errors import CheckpointError, MpipipeError
from mpipipe.graph.program import empty
from mpipipe.ops.device import CPU
from mpipipe.runtime.optimizer import (
    Optimizer,
    OptimizerSettings,
    Saved,
    Updater,
    check_fits,
    factor_dtype,
)
from mpipipe.runtime.plain import DROPPED, overlay, plain, restored
from mpipipe.runtime.weights import StageWeights

Made = TorchOptimizer | tuple[TorchOptimizer, LRScheduler]
Factory = Callable[[list[tuple[str, nn.Parameter]]], Made]
GROUPS = "param_groups"


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


def optimizer_of(
    given: Factory | OptimizerSettings | None, clip: float | None, bits: Literal["torch", "fast"]
) -> Optimizer:
    """What `Pipeline` is given; None: AdamW. clip: as there. Raises MpipipeError for what is neither, and
    for numbers that train nothing."""
    limit = given.clip if clip is None and isinstance(given, OptimizerSettings) else clip
    if limit is not None and not limit > 0:
        raise MpipipeError(f"clip = {limit}; give a number above 0, or None for no limit")
    if callable(given):
        return UserOptimizer(given, clip)
    if not isinstance(given, OptimizerSettings | None):
        raise MpipipeError(
            f"optimizer is a {type(given).__name__}; give the function that makes it, since each rank has "
            "parameters of its own: lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3)"
        )
    settings = replace(given or OptimizerSettings(), bits=bits)
    if settings.kind not in ("adamw", "sgd"):
        raise MpipipeError(
            f"OptimizerSettings(kind={settings.kind!r}); expected 'adamw' or 'sgd'; for another one give the "
            "function that makes it"
        )
    if not 0 <= settings.lr < math.inf:
        raise MpipipeError(f"OptimizerSettings(lr={settings.lr}); give a number, 0 at least")
    if settings.steps is None and settings.min_lr_ratio != 1:
        raise MpipipeError(
            f"OptimizerSettings(min_lr_ratio={settings.min_lr_ratio}) without steps; say after how many the "
            "rate is that, as steps=1000"
        )
    _check_ranges(settings)
    return settings if clip is None else replace(settings, clip=clip)


def _check_ranges(settings: OptimizerSettings) -> None:
    """The ranges are those of the configuration."""
    names = ("betas", "eps", "momentum", "weight_decay", "warmup", "min_lr_ratio")
    given: dict[str, Any] = {name: getattr(settings, name) for name in names}
    if settings.steps is not None:
        given["steps"] = settings.steps
    try:
        TrainConfig(**given)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = str(wrong["loc"][0])
        raise MpipipeError(
            f"OptimizerSettings({name}={getattr(settings, name)!r}): {wrong['msg'].lower()}"
        ) from error


def _kinds(made: object) -> str:
    """Of what a factory has returned, for people."""
    if isinstance(made, tuple):
        return f"({', '.join(map(_kinds, made))})"
    return "None" if made is None else f"a {type(made).__name__}"


class ForeignUpdater:
    def __init__(self, factory: Factory, weights: StageWeights) -> None:
        self.params: dict[str, nn.Parameter] = {}
        grads = weights.own_grads  # in the order of the model: a factory may go by it, on one rank
        self.grads = list(grads.values())
        self.data = [weights.data[name] for name in grads]
        for name, data in zip(grads, self.data, strict=True):
            self.params[name] = nn.Parameter(data)  # shares the memory of the flat buffer
        self._give_grads()  # a factory may look at them
        self.optimizer: TorchOptimizer | None = None
        self.scheduler: LRScheduler | None = None
        if self.params:  # torch refuses an empty list
            self.optimizer, self.scheduler = self._make(factory)
            self._check(self.optimizer)
            if self.params.keys() != weights.learning.keys():
                self._check_alike(factory, weights.learning)
        self.kind = type(self.optimizer).__name__ if self.optimizer else ""

    def _make(self, factory: Factory) -> tuple[TorchOptimizer, LRScheduler | None]:
        try:
            made = factory(list(self.params.items()))
        except ValueError as error:
            if twice := self._twice(error):
                raise MpipipeError(
                    f"the optimizer factory puts {twice[0]!r} into two parameter groups "
                    f"({len(twice)} parameters in all); make the groups disjoint"
                ) from error
            if "empty parameter list" in str(error):
                raise MpipipeError(
                    f"the optimizer factory leaves out all {len(self.params)} parameters of a stage, as "
                    f"{next(iter(self.params))!r}; give every parameter to a group, or freeze it in the "
                    "model with requires_grad_(False)"
                ) from error
            raise
        optimizer, scheduler = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(optimizer, TorchOptimizer):
            raise MpipipeError(
                f"the optimizer factory returns {_kinds(made)}; return the optimizer, or (optimizer, "
                "scheduler)"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MpipipeError(
                "the optimizer factory makes an LBFGS, which looks at all parameters at once and runs "
                "forward by itself; a stage has its own only: use AdamW, SGD or another by parameter"
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            raise MpipipeError(
                "the optimizer factory makes a ReduceLROnPlateau, which needs a metric at each step; "
                "schedulers are stepped here after every step, with none: use one that needs none"
            )
        return optimizer, scheduler

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

    def _check_alike(self, factory: Factory, everything: Mapping[str, Tensor]) -> None:
        """Refuses options that depend on which other parameters are in the list, as those by position do: on
        another number of ranks they would be others. A factory or an optimizer that cannot take parameters
        without values is let through."""
        whole = {
            name: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"))
            for name, p in everything.items()
        }
        try:
            made = factory(list(whole.items()))
            of_all = _options_by_name(made[0] if isinstance(made, tuple) else made, whole)
        except Exception:  # what it raises is of the user's own, and any
            return
        assert self.optimizer is not None, "or there is nothing to compare"
        for name, options in _options_by_name(self.optimizer, self.params).items():
            then = of_all.get(name, options)
            for key in options:
                if key in then and options[key] != then[key]:
                    raise MpipipeError(
                        f"the optimizer factory sets {key} = {options[key]!r} for {name!r} in the list of "
                        f"the {len(self.params)} parameters of one stage, and {key} = {then[key]!r} in that "
                        f"of all {len(whole)}: it would depend on the number of ranks; let it go by the "
                        "parameter's name or shape, not by its position or by how many there are"
                    )

    @torch.no_grad()
    def update(self, step: int, factor: float | None) -> None:
        if self.optimizer is None:
            return
        self._give_grads()
        if factor is not None:
            for grad in self.grads:
                grad.mul_(torch.tensor(factor, dtype=factor_dtype(grad.dtype)))
        self.optimizer.step()
        for (name, p), data in zip(self.params.items(), self.data, strict=True):
            if p.data_ptr() != data.data_ptr():
                self._take_back(name, p, data)
        for grad in self.grads:
            grad.zero_()
        if self.scheduler is not None:
            self.scheduler.step()

    def _take_back(self, name: str, p: nn.Parameter, data: Tensor) -> None:
        """The values of a parameter whose `data` the optimizer has made anew, to where forward reads them."""
        if (p.shape, p.dtype) != (data.shape, data.dtype):
            raise MpipipeError(
                f"the optimizer makes {name!r} a {p.dtype} of {list(p.shape)}; it is a {data.dtype} of "
                f"{list(data.shape)}, and must stay so"
            )
        assert self.optimizer is not None, "or nobody has made it"
        kept = self.optimizer.state.get(p, {})
        for key, value in kept.items():
            if isinstance(value, Tensor) and value.data_ptr() == data.data_ptr():
                kept[key] = value.clone()  # the values from before
        data.copy_(p)
        p.data = data

    def _give_grads(self) -> None:
        """Anew in each step: an optimizer may have taken them away."""
        for p, grad in zip(self.params.values(), self.grads, strict=True):
            p.grad = grad

    def state(self) -> dict[str, Tensor]:
        return {f"{name}/{key}": value for name, key, value in self._kept() if isinstance(value, Tensor)}

    def _kept(self) -> Iterator[tuple[str, str, Any]]:
        """(parameter, key, value) of all that the optimizer keeps by parameter."""
        if self.optimizer is not None:
            for name, p in self.params.items():
                for key, value in self.optimizer.state.get(p, {}).items():
                    yield name, key, value

    def numbers(self) -> dict[str, Any]:
        """ "parameter/key": number or None, and for the whole stage, under its first parameter,

            "parameter/param_groups": {"groups": [{"params": {parameter: its keys}, "options": {...}}, ...],
                                       "scheduler": None | {"kind": its class, "state": {...}}}

        What else is in groups and scheduler (functions, objects) the factory makes again.
        """
        if self.optimizer is None:
            return {}
        self._check_kept(self.optimizer)
        keys: dict[str, list[str]] = {name: [] for name in self.params}
        for name, key, _ in self._kept():
            keys[name].append(key)
        groups = [
            {"params": {name: keys[name] for name in self._names(group)}, "options": _options(group)}
            for group in self.optimizer.param_groups
        ]
        scheduler = self.scheduler and {
            "kind": type(self.scheduler).__name__, "state": plain(self.scheduler.state_dict())
        }  # fmt: skip
        stage = {"groups": groups, "scheduler": scheduler}
        numbers = {
            f"{n}/{key}": plain(value) for n, key, value in self._kept() if not isinstance(value, Tensor)
        }
        return numbers | {f"{next(iter(self.params))}/{GROUPS}": stage}

    def _names(self, group: Mapping[str, Any]) -> list[str]:
        names = {id(p): name for name, p in self.params.items()}
        return [names[id(p)] for p in group["params"]]

    def _check_kept(self, optimizer: TorchOptimizer) -> None:
        """That a checkpoint can keep it all."""
        known = {id(p) for p in self.params.values()}
        shared = [key for key in optimizer.state if id(key) not in known]
        if shared:
            what = "a tensor" if isinstance(shared[0], Tensor) else repr(shared[0])
            raise CheckpointError(
                f"the optimizer {self.kind!r} keeps state for {what}, none of the parameters that it was "
                "given; a checkpoint holds state by parameter: keep it for each of them"
            )
        for name, key, value in self._kept():
            number = value is None or isinstance(value, (Tensor, int, float))
            if not number or not isinstance(key, str) or "/" in key or key == GROUPS:
                raise CheckpointError(
                    f"the optimizer {self.kind!r} keeps {key!r} for the parameter {name!r}, a "
                    f"{type(value).__name__}; a checkpoint holds tensors and numbers under plain names: "
                    "keep it as one of those"
                )
        for group in optimizer.param_groups:
            for key, value in group.items():
                if isinstance(value, Tensor) and value.numel() != 1:
                    raise CheckpointError(
                        f"the optimizer {self.kind!r} keeps {key!r}, a tensor of {list(value.shape)}, for a "
                        f"whole group, that of {self._names(group)[:1]}; keep it by parameter, in `state`"
                    )

    @torch.no_grad()
    def load(self, saved: Saved, optimizer: Mapping[str, Any]) -> None:
        """Groups and scheduler get the numbers that they had, also where the factory now gives others."""
        if self.optimizer is None:
            return
        numbers = optimizer["numbers"]
        stages = [value for value in numbers.values() if isinstance(value, dict)]
        places = {
            name: _Place(stage, i)
            for stage in stages
            for i, group in enumerate(stage["groups"])
            for name in group["params"]
        }
        keys = {name: places[name].group["params"][name] for name in self.params if name in places}
        made = {f"{name}/{key}" for name, key, _ in self._kept()}  # by its constructor
        wanted = made | {f"{name}/{key}" for name in keys for key in keys[name]}
        check_fits(saved, optimizer, self.kind, self.params.keys(), wanted)
        if new := [name for name in self.params if name not in places]:
            raise CheckpointError(
                f"{saved.folder}: was saved when {new[0]!r} was not trained ({len(new)} parameters in all); "
                "resume with the model that it was saved with"
            )
        for name, p in self.params.items():
            for key in keys[name]:
                full = f"{name}/{key}"
                device = p.device if _is_there(self.optimizer, key) else CPU
                self.optimizer.state[p][key] = (
                    numbers[full] if full in numbers else _read(saved, full, device)
                )
        self._load_groups(self.optimizer, saved, places)

    def _load_groups(self, optimizer: TorchOptimizer, saved: Saved, places: Mapping[str, _Place]) -> None:
        found: list[_Place | None] = []
        for group in optimizer.param_groups:
            here = [places[name] for name in self._names(group)]
            found.append(here[0] if here else None)
            if any(place.group["options"] != here[0].group["options"] for place in here):
                raise CheckpointError(
                    f"{saved.folder}: the group of {self._names(group)[0]!r} was two with different settings "
                    "then; resume with the parameter groups that it was saved with"
                )
            for key, value in here[0].group["options"].items() if here else ():
                group[key] = restored(group.get(key), value)
        then = [place.stage["scheduler"] for place in found if place]
        kinds = {"none" if one is None else one["kind"] for one in then}
        kind = type(self.scheduler).__name__ if self.scheduler else "none"
        if kinds != {kind}:
            raise CheckpointError(
                f"{saved.folder}: was saved with the scheduler {' and '.join(sorted(kinds))}, this run has "
                f"{kind}; resume with the scheduler that it was saved with"
            )
        if self.scheduler is not None:
            state = [(place or next(filter(None, found))).stage["scheduler"]["state"] for place in found]
            index = [(place.index, len(place.stage["groups"])) if place else None for place in found]
            self.scheduler.load_state_dict(overlay(self.scheduler.state_dict(), state, index))


@dataclass(frozen=True)
class _Place:
    """Of a parameter in a checkpoint."""

    stage: dict[str, Any]
    index: int  # of its group

    @property
    def group(self) -> dict[str, Any]:
        return self.stage["groups"][self.index]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group is set to; lists may go by the parameters of the stage, and are the factory's."""
    single = {key: plain(v) for key, v in group.items() if not isinstance(v, (list, dict))}
    return {key: value for key, value in single.items() if value is not DROPPED}


def _options_by_name(optimizer: TorchOptimizer, params: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    names = {id(p): name for name, p in params.items()}
    return {
        names[id(p)]: _options(group)
        for group in optimizer.param_groups
        for p in group["params"]
        if id(p) in names
    }


def _is_there(optimizer: TorchOptimizer, key: str) -> bool:
    """Whether state is on the device of its parameter: all but torch's count of steps, and that too where the
    optimizer reads it there."""
    return key != "step" or any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)


def _read(saved: Saved, name: str, device: torch.device) -> Tensor:
    value = empty(saved.spec(name), device)
    saved.read(name, value)
    return value
