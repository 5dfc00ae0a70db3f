"""Parts of a tensor, whose gradients are one tensor where attention has put them into one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mpipipe.ops import flash_attention, kernels
from mpipipe.ops.parts import distance, parts

SHAPE = 2, 5, 3, 4, 8  # samples, tokens, parts, heads, width


def gradient(split: Callable[[Tensor], tuple[Tensor, ...]], of: Callable[..., Tensor]) -> list[Tensor]:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = of(*split(x))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y.detach(), *torch.autograd.grad(y, x, dy)]


def as_heads(x: Tensor) -> Tensor:  # (B, T, H, E) -> (B, H, T, E)
    return x.transpose(1, 2)


WAYS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], ...]] = {
    "unbind": (lambda x: x.unbind(2), lambda x: parts(x, 2)),
    "unbind of a view": (
        lambda x: x.permute(2, 0, 1, 3, 4).unbind(0),
        lambda x: parts(x.permute(2, 0, 1, 3, 4), 0),
    ),
    "split": (
        lambda x: tuple(t.view(2, 5, 4, 8) for t in torch.split(x.view(2, 5, 96), 32, 2)),
        lambda x: tuple(t.view(2, 5, 4, 8) for t in parts(x.view(2, 5, 96), -1, 32)),
    ),
}


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attention(as_heads(q), as_heads(k), as_heads(v), causal=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of", ["attention", "sums", "a part alone", "a part twice"])
def test_the_bits_are_those_of_torch(way: str, of: str) -> None:
    use: dict[str, Callable[..., Tensor]] = {
        "attention": attention,
        "sums": lambda q, k, v: (q * k).exp() + v,
        "a part alone": lambda q, k, v: k.sin(),
        "a part twice": lambda q, k, v: attention(q, k, v) + as_heads(v).cos(),
    }
    torchs, ours = (gradient(split, use[of]) for split in WAYS[way])
    assert all(map(torch.equal, torchs, ours))


@pytest.mark.skipif(kernels is None, reason="the compiled kernels are not built")
@pytest.mark.kernels
@pytest.mark.parametrize("way", WAYS)
def test_what_attention_has_put_together_is_not_copied(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Tensor:
        raise AssertionError("the gradients are copied")

    expected = gradient(WAYS[way][1], attention)
    monkeypatch.setattr(Tensor, "new_empty_strided", refuse)
    assert all(map(torch.equal, expected, gradient(WAYS[way][1], attention)))
    with pytest.raises(AssertionError, match="copied"):
        gradient(WAYS[way][1], lambda q, k, v: (q * k).exp() + v)


@pytest.mark.parametrize("together", [True, False])
def test_the_gradient_has_the_strides_of_what_is_parted(together: bool) -> None:
    base = torch.randn(2, 3, 8, 5).permute(0, 3, 1, 2).requires_grad_()
    seen: list[Tensor] = []
    x = base * 1.0
    x.register_hook(seen.append)
    a, b, c = parts(x, 2)
    grads = torch.randn(2, 3, 8, 5).permute(0, 3, 1, 2).unbind(2)
    torch.autograd.backward((a, b, c), grads if together else [g.contiguous() for g in grads])
    assert seen[0].stride() == x.stride()
    assert torch.equal(seen[0], torch.stack(grads, 2))


def test_second_derivatives_are_those_of_torch() -> None:
    def second(split: Callable[[Tensor], tuple[Tensor, ...]]) -> Tensor:
        x = torch.arange(1.0, 7.0).view(3, 2).requires_grad_()
        (g,) = torch.autograd.grad(torch.stack(split(x)).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(g.sum(), x)[0]

    assert torch.equal(second(lambda x: parts(x, 0)), second(lambda x: x.unbind(0)))


def test_distance() -> None:
    base = torch.zeros(96)
    thirds = base.view(3, 4, 8).unbind()
    assert distance(thirds) == 32
    assert distance(base.view(4, 3, 8).unbind(1)) == 8
    assert distance(base.view(4, 8, 3).unbind(2)) == 1
    assert distance([t.t() for t in thirds]) == 32
    apart = thirds[0], thirds[1].clone(), thirds[2]
    overlapping = base[:32], base[16:48], base[32:64]
    uneven = base[:8], base[8:16], base[24:32]
    with_gaps = base[:8], base[16:24], base[32:40]
    inner_gaps = base.view(3, 4, 8)[:, :, :4].unbind()
    of_other_shape = base[:8], base[8:16].view(2, 4)
    wrong = (thirds[:1], thirds[::-1], apart, overlapping, uneven, with_gaps, inner_gaps, of_other_shape)
    assert [distance(tensors) for tensors in (*wrong, torch.zeros(3, 0).unbind())] == [0] * 9


def test_without_a_gradient_they_are_views() -> None:
    x = torch.randn(SHAPE)
    assert all(map(torch.equal, parts(x, 2), x.unbind(2)))
    assert parts(x, 2)[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
