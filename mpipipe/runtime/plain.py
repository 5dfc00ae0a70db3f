"""Settings of groups and schedulers as plain JSON, and back into those of a stage that was cut otherwise.

A scheduler's state has lists with one entry per group (`base_lrs`), and a stage has its own groups.
Each entry is taken from where the group's first parameter was:

    saved    stage 0: groups [a, b]   base_lrs [1, 2]        stage 1: groups [c]   base_lrs [3]
    now      stage 0: groups [b, c]   base_lrs [2, 3]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

DROPPED = object()


def plain(value: Any) -> Any:
    """`value` of None, bools, numbers, texts, tensors of one number, lists, tuples and dicts with texts as
    keys, as JSON has it; DROPPED for anything else, which a dict is left without."""
    if isinstance(value, float):
        return float(value)  # also what numpy gives
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        items = [plain(item) for item in value]
        return DROPPED if any(item is DROPPED for item in items) else items
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        items_by_key = {key: plain(item) for key, item in value.items()}
        return {key: item for key, item in items_by_key.items() if item is not DROPPED}
    return DROPPED


def restored(now: Any, value: Any) -> Any:
    """A plain value in the form that `now` has."""
    if isinstance(now, Tensor):
        return now.fill_(value)
    return tuple(value) if isinstance(now, tuple) else value


def overlay(now: Any, saved: Sequence[Any], index: Sequence[tuple[int, int] | None]) -> Any:
    """`now` with the saved values over it. By group of this stage: saved, plain, of the stage that the group
    was in; index, (number of the group there, how many groups it had), None for an empty group."""
    if isinstance(now, dict):
        known = [key for key in saved[0] if all(key in one for one in saved)]
        return now | {key: overlay(now.get(key), [one[key] for one in saved], index) for key in known}
    if isinstance(now, list) and all(one == now for one in saved):
        return now  # also a tensor stays one
    if not isinstance(now, list):
        return restored(now, saved[0])
    if any(isinstance(item, dict) for item in now):  # the schedulers of a SequentialLR
        if any(len(one) != len(now) for one in saved):
            return now
        return [overlay(item, [one[i] for one in saved], index) for i, item in enumerate(now)]
    fits = (place is None or len(one) == place[1] for one, place in zip(saved, index, strict=True))
    if len(now) == len(index) and all(fits):
        by_group = zip(now, saved, index, strict=True)
        return [restored(item, one[place[0]]) if place else item for item, one, place in by_group]
    return saved[0]
