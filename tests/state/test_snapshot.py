"""A copy of named tensors in one buffer, which is used again."""

from __future__ import annotations

import pytest
import torch

from mpipipe.graph.program import spec
from mpipipe.state.snapshot import Snapshot, needed_bytes, views

TENSORS = {
    "w": torch.randn(7, 3, requires_grad=True),
    "t": torch.randn(3, 5).t(),
    "half": torch.randn(5).bfloat16(),
    "on": torch.tensor(True),
    "step": torch.tensor(3),
    "empty": torch.empty(0, 4),
}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(spec(a[n]) == spec(b[n]) and torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("reserved", [0, 1, 4096])
def test_copies_stay_as_they_were_in_memory_that_is_used_again(reserved: int) -> None:
    snapshot, live = Snapshot(reserved), {n: t.detach().clone() for n, t in TENSORS.items()}
    snapshot.take(TENSORS)
    place = snapshot.buffer.data_ptr()
    assert snapshot.buffer.numel() == max(reserved, needed_bytes({n: spec(t) for n, t in TENSORS.items()}))
    with torch.no_grad():
        TENSORS["w"].add_(1)
    assert same(snapshot.views, live)
    assert all(t.data_ptr() % 64 == 0 for t in snapshot.views.values() if t.numel())
    snapshot.take({"w": TENSORS["w"]})
    assert snapshot.buffer.data_ptr() == place
    assert same(snapshot.views, {"w": TENSORS["w"]})


def test_a_buffer_that_came_from_elsewhere_is_read_by_the_same_specs() -> None:
    snapshot, specs = Snapshot(), {n: spec(t) for n, t in TENSORS.items()}
    snapshot.take(TENSORS)
    assert same(views(snapshot.buffer.clone(), specs), snapshot.views)
