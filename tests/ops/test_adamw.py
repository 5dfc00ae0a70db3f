"""AdamW over flat buffers against its formula in float64, wherever an element lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled import instruction_sets, with_threads
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.ops import adamw
from mpipipe.ops.adamw import _by_torch

pytestmark = pytest.mark.kernels

HOW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LENGTHS = st.one_of(st.integers(0, 70), st.integers(0, 40_000))
Buffers = dict[str, torch.Tensor]


def buffers(n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Buffers:
    g = torch.Generator().manual_seed(seed)
    b = {name: torch.randn(n, generator=g) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    b["exp_avg_sq"].square_()
    if dtype == torch.bfloat16:
        b["master"] = b["param"]
        b |= {"param": b["param"].to(dtype), "grad": b["grad"].to(dtype)}
    return b


def copies(b: Buffers) -> Buffers:
    return {name: t.clone() for name, t in b.items()}


def exact(b: Buffers, step: int, factor: float) -> Buffers:
    """The formula in float64: w, exp_avg and exp_avg_sq after the step, and how large their summands are."""
    d = {name: t.double() for name, t in b.items()}
    (one, two), lr = HOW["betas"], HOW["lr"]
    g = d["grad"] * factor
    m, v = one * d["exp_avg"] + (1 - one) * g, two * d["exp_avg_sq"] + (1 - two) * g * g
    move = lr / (1 - one**step) * m / ((v / (1 - two**step)).sqrt() + HOW["eps"])
    w = d.get("master", d["param"]) * (1 - lr * HOW["weight_decay"]) - move
    sizes = {"w size": w.abs() + move.abs(), "exp_avg size": m.abs() + g.abs(), "exp_avg_sq size": v}
    return {"w": w, "exp_avg": m, "exp_avg_sq": v} | sizes


def after(b: Buffers) -> Buffers:
    return {"w": b.get("master", b["param"]), "exp_avg": b["exp_avg"], "exp_avg_sq": b["exp_avg_sq"]}


def by_torch(b: Buffers, step: int, factor: float) -> Buffers:
    b = copies(b)
    _by_torch(*(b.get(n) for n in NAMES), step, factor=factor, **HOW)
    return b


NAMES = ("param", "grad", "exp_avg", "exp_avg_sq", "master")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(LENGTHS, st.integers(1, 1000), st.floats(1e-3, 1), st.sampled_from([1e-30, 1.0, 1e12]))
def test_errors_are_at_most_twice_those_of_torch(dtype, n, step, factor, size):
    b = buffers(n, dtype, n)
    b["grad"].mul_(size)
    wanted, torchs, ours = exact(b, step, factor), by_torch(b, step, factor), copies(b)
    adamw(**ours, step=step, factor=factor, **HOW)
    for name, value in after(ours).items():
        error, theirs = (
            max(((t.double() - wanted[name]).abs() / wanted[f"{name} size"]).tolist(), default=0.0)
            for t in (value, after(torchs)[name])
        )
        assert error <= 2 * max(theirs, 2.0**-23)  # of few elements torch may happen to have the exact result
    assert not ours["grad"].any()
    if dtype == torch.bfloat16:
        assert torch.equal(ours["param"], ours["master"].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.integers(0, 300), st.integers(0, 200), st.integers(0, 100))
def test_an_element_has_the_same_bits_wherever_it_lies(dtype, n, before, behind):
    whole = buffers(before + n + behind, dtype, n)
    part = {name: t[before : before + n].clone() for name, t in whole.items()}
    adamw(**whole, step=3, **HOW)
    adamw(**part, step=3, **HOW)
    for name, t in part.items():
        assert torch.equal(t, whole[name][before : before + n])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_bits(dtype):
    def run() -> Buffers:
        b = buffers(100_001, dtype)
        adamw(**b, step=3, factor=0.3, **HOW)
        return b

    one, *more = with_threads(run)
    assert all(torch.equal(one[name], other[name]) for other in more for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_instruction_sets_agree(dtype):
    b = buffers(1000, dtype)
    wanted = by_torch(b, 3, 0.3)
    for kernels in instruction_sets():
        run = kernels.adamw_f32 if dtype == torch.float32 else kernels.adamw_bf16
        ours = copies(b)
        at = [ours[name].data_ptr() if name in ours else 0 for name in NAMES]
        run(*at, 1000, 0.3, HOW["lr"], *HOW["betas"], HOW["eps"], HOW["weight_decay"], 3, 1)
        for name, value in after(ours).items():
            torch.testing.assert_close(value, after(wanted)[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extremes_are_as_in_torch(dtype):
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 1e30, -1e-30] * 9)
    b = buffers(len(values), dtype) | {"grad": values.to(dtype), "exp_avg_sq": torch.zeros(len(values))}
    theirs = by_torch(b, 1, 1.0)
    adamw(**b, step=1, **HOW)
    assert not b["grad"].any()
    for name, value in after(b).items():
        torch.testing.assert_close(value, after(theirs)[name], rtol=1e-5, atol=1e-30, equal_nan=True)


def test_other_buffers_are_refused():
    b = buffers(8)
    wrong = [
        ({"param": b["param"].double()}, "param is torch.float64; it must be float32"),
        ({"grad": b["grad"].bfloat16()}, r"grad is \(8,\) of torch.bfloat16.*must be of torch.float32"),
        ({"exp_avg": torch.zeros(9)}, r"exp_avg is \(9,\)"),
        ({"exp_avg_sq": torch.zeros(16)[::2]}, r"exp_avg_sq has shape \(8,\) and strides \(2,\)"),
        ({"master": b["param"]}, "with a master"),
        ({"param": b["param"].bfloat16(), "grad": b["grad"].bfloat16()}, "without a master"),
        ({"exp_avg": b["param"]}, "param and exp_avg share memory"),
        ({"step": 0}, "step=0"),
    ]
    for change, message in wrong:
        for call in (adamw, by_name):
            with pytest.raises(ValueError, match=message):
                call(**(b | {"step": 1} | HOW | change))
    with pytest.raises(ValueError, match=r"lr has shape \(2,\); it must be one number"):
        by_name(**b, step=1, **(HOW | {"lr": torch.ones(2)}))


def arguments(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor,
    master: torch.Tensor | None = None, *, step: int, lr: Any, betas: tuple[float, float], eps: float,
    weight_decay: float, factor: Any = 1.0,
) -> tuple[Any, ...]:  # fmt: skip
    """As the registered operator has them."""
    lr, factor = (torch.as_tensor(number, dtype=torch.float64) for number in (lr, factor))
    return param, grad, exp_avg, exp_avg_sq, master, step, lr, *betas, eps, weight_decay, factor


def by_name(**given: Any) -> None:
    torch.ops.mpipipe.adamw(*arguments(**given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_registered_operator(dtype):
    b = buffers(33, dtype)
    torch.library.opcheck(torch.ops.mpipipe.adamw, arguments(**copies(b), step=3, factor=0.3, **HOW))
    one, other, numbers = copies(b), copies(b), copies(b)
    adamw(**one, step=3, factor=0.3, **HOW)
    by_name(**other, step=3, factor=0.3, **HOW)
    adamw(**numbers, step=3, factor=torch.tensor(0.3, dtype=torch.float64), **HOW)
    for name, t in one.items():
        assert torch.equal(t, other[name])
        assert torch.equal(t, numbers[name])


def test_what_autograd_has_kept_is_known_to_be_overwritten():
    b = buffers(8)
    w = b["param"].requires_grad_()
    loss = (w * w).sum()
    by_name(**b, step=1, **HOW)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        by_name(**buffers(8), step=1, **HOW)


def test_autograd_sees_that_a_parameter_has_changed() -> None:
    param = torch.nn.Parameter(torch.ones(8))
    y, rest = (param * param).sum(), [torch.zeros(8) for _ in range(3)]
    adamw(param, *rest, step=1, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
