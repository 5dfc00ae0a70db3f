"""Updates over lists have the bits of torch's own optimizers, which go parameter by parameter."""

import pytest
import torch

from mpipipe.cluster import memory
from mpipipe.runtime import updates
from mpipipe.runtime.optimizer import Bits, FlatUpdater, OptimizerSettings, norms
from mpipipe.runtime.weights import Flat, ParamGroup

SHAPES = {"large": (3, 70_001), "one": (1,), "odd": (5, 7), "whole vectors": (64, 64), "tail": (17,)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("piece", [updates.PIECE, 1 << 10])
@pytest.mark.parametrize(
    "settings",
    [
        OptimizerSettings(lr=1e-2),
        OptimizerSettings(lr=1e-2, weight_decay=0.0),
        OptimizerSettings("sgd", lr=1e-2),
        OptimizerSettings("sgd", lr=1e-2, momentum=0.0, weight_decay=0.0),
    ],
    ids=str,
)
def test_the_bits_of_torch(
    settings: OptimizerSettings, piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "PIECE", piece)
    torch.manual_seed(0)
    data = Flat.like({name: torch.Size(shape) for name, shape in SHAPES.items()}, dtype)
    for view in data.views.values():
        view.copy_(torch.randn(view.shape, dtype=dtype))
    group = ParamGroup(True, data, data.sibling())
    plain = {name: view.clone().requires_grad_() for name, view in data.views.items()}
    decay = {"lr": settings.lr, "weight_decay": settings.weight_decay, "foreach": False}
    if settings.kind == "adamw":
        torchs: torch.optim.Optimizer = torch.optim.AdamW(
            plain.values(), betas=settings.betas, eps=settings.eps, fused=False, **decay
        )
    else:
        torchs = torch.optim.SGD(plain.values(), momentum=settings.momentum, **decay)
    updater = FlatUpdater([group], settings)
    for step in range(4):
        for name, view in group.grad.views.items():
            plain[name].grad = torch.randn(view.shape, dtype=dtype)
            view.copy_(plain[name].grad)
        torchs.step()
        updater.update(step, None)
        assert not group.grad.buffer.any()
    for name, view in data.views.items():
        assert torch.equal(view, plain[name]), name


@pytest.mark.parametrize("bits", ["torch", "fast"])
def test_the_norm_of_a_complex_gradient(bits: Bits) -> None:
    data = Flat.like({"a": torch.Size((2,)), "b": torch.Size((1,))}, torch.complex64)
    data.views["a"].copy_(torch.tensor([3.0 + 4.0j, 12.0j]))
    assert norms([data], bits) == {"a": 13.0, "b": 0.0}


def test_a_chunk_has_at_most_a_piece_and_nothing_is_left_out() -> None:
    data = Flat.like({name: torch.Size(shape) for name, shape in SHAPES.items()}, torch.float32)
    found = updates.chunks(data, data.sibling())
    assert all(sum(t.numel() for t in weights) <= updates.PIECE for weights, _ in found)
    assert [[t.numel() for t in weights] for weights, _ in found] == [[131072], [78931, 1, 35, 4096, 17]]
    assert sum(t.numel() for weights, _ in found for t in weights) == sum(
        v.numel() for v in data.views.values()
    )


@pytest.mark.slow
@pytest.mark.skipif(not memory._restart_peak(), reason="the system cannot forget the highest so far")
def test_a_flat_buffer_takes_memory_only_where_it_is_written() -> None:
    """Another plan is taken up while there still is what the run has."""
    made = list[Flat]()
    taken = memory.growth_bytes(lambda: made.append(Flat.like({"a": torch.Size((64 << 20,))}, torch.float32)))
    buffer = made[0].buffer
    assert taken < buffer.nbytes // 4
    assert (buffer.data_ptr() % 64, buffer.storage_offset(), int(buffer.count_nonzero())) == (0, 0, 0)
    assert memory.growth_bytes(lambda: buffer.add_(1.0)) > buffer.nbytes // 4 * 3
