"""Parts that cannot be traced: each runs as it is written, wherever the model is cut, to the same bits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import differences, every_cut, plain, specs_of, staged, variants_of
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from mpipipe.errors import CaptureError
from mpipipe.graph.cut import Code
from mpipipe.graph.group_costs import group_costs
from mpipipe.graph.pieces import pieces
from mpipipe.graph.profile import Profiler

DRAW = torch.Generator().manual_seed(3)
BATCH = {"x": torch.randn(6, 8, generator=DRAW), "y": torch.randint(4, (6,), generator=DRAW)}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    return nn.functional.cross_entropy(outputs, batch["y"], reduction="sum"), 6.0


class Branch(nn.Module):
    """Decides on values, as no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x.abs().sum()) % 3):
            x = torch.tanh(self.up(x)) if x.mean() > 0 else self.down(x)  # here
        return x


class Pair(nn.Module):
    """Gives its next a tuple and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return {"both": (self.lin(x), x), "factor": 0.5}


class Unpair(nn.Module):
    def forward(self, given: Any) -> Tensor:
        a, b = given["both"]
        return a * given["factor"] + b


def layers() -> list[nn.Module]:
    return [
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)),
        Branch(),
        nn.Sequential(nn.BatchNorm1d(8), nn.Flatten()),
        Pair(),
        Unpair(),
        nn.Linear(8, 4),
    ]


def model() -> nn.Sequential:
    return nn.Sequential(*layers())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.slow
def test_bits_are_those_of_eager_torch_wherever_it_is_cut(precision: str) -> None:
    variants = variants_of(layers, loss, BATCH, precision)  # type: ignore[arg-type]
    assert variants.primary.captured.written
    expected = plain(variants, model, BATCH)
    for cuts in every_cut(variants):
        got = staged(variants, cuts, BATCH)
        idle = {n for n, g in got.items() if n not in expected and not g.any()}
        assert differences(expected, {n: g for n, g in got.items() if n not in idle}) == [], cuts


@pytest.mark.slow
def test_a_layer_is_a_group_and_has_costs() -> None:
    variants = variants_of(layers, loss, BATCH)  # type: ignore[arg-type]
    assert variants.graph.groups[:3] == ("0.0/linear.0", "1/Branch.0", "2.0/batch_norm.0")
    parts = pieces(variants.primary, variants.graph, variants.uses)
    profiler = Profiler(variants.primary, "fp32")
    samples = {p.key: profiler.sample(p) for p in parts}
    assert len(samples) == len(parts), "no two of them do equal work"
    assert not parts[1].lasting, "its code may be another one in the next run"
    costs = group_costs(variants.primary, parts, samples)
    assert [c.param_bytes for c in costs][:3] == [288, 576, 64]
    other = variants_of(layers, loss, BATCH)  # type: ignore[arg-type]
    assert other.graph.hash == variants.graph.hash


@pytest.mark.slow
def test_batch_norm_statistics_leave_as_outputs() -> None:
    variants = variants_of(layers, loss, BATCH)  # type: ignore[arg-type]
    assert [(u.buffer, u.momentum) for u in variants.primary.captured.updates] == [
        ("2.0.running_mean", 0.1), ("2.0.running_var", 0.1), ("2.0.num_batches_tracked", None),
    ]  # fmt: skip
    code = variants.code("train", specs_of(BATCH), (), 0)
    first = variants.source.materialise([*variants.source.params, *variants.source.buffers])
    eager = model()
    eager.load_state_dict(first)
    eager(BATCH["x"])
    before = {n: t.clone() for n, t in first.items()}
    leaves = [first[n] for n, _ in code.leaves]
    _, statistics = code.forward(
        *(BATCH[k] for k in code.inputs), *leaves, *(first[n] for n in code.buffers), 0, 0
    )
    assert all(torch.equal(first[n], before[n]) for n in first), "forward changes nothing"
    for update, value in zip(code.updates[:2], statistics, strict=False):
        buffer = first[update.buffer].mul_(0.9).add_(value, alpha=0.1)
        assert torch.equal(buffer, eager.state_dict()[update.buffer])
    assert statistics[2] is None


@pytest.mark.slow
def test_evaluation_and_prediction_follow_the_cut() -> None:
    variants = variants_of(layers, loss, BATCH)  # type: ignore[arg-type]
    first = variants.source.materialise([*variants.source.params, *variants.source.buffers])
    eager = model()
    eager.load_state_dict(first)
    wanted = eager.eval()(BATCH["x"])
    cuts = variants.graph.groups[2:5]
    for mode in ("eval", "predict"):
        sent: Any = ()
        for stage in range(len(cuts) + 1):
            code = variants.code(mode, specs_of(BATCH), cuts, stage)  # type: ignore[arg-type]
            tensors = [BATCH[k] for k in code.inputs] + [first[n] for n, _ in code.leaves]
            tensors += [first[n] for n in code.buffers]
            sent, _ = code.forward(*sent, *tensors, *((0, 0) if code.random else ()))
        structure = variants.anatomy(mode, specs_of(BATCH)).captured.structure  # type: ignore[arg-type]
        got = sent[0] if structure is None else tree_unflatten(sent, structure)
        assert torch.equal(got, loss(wanted, BATCH)[0] if mode == "eval" else wanted)


class Noisy(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5) + torch.poisson(x.abs())


@pytest.mark.slow
def test_random_numbers_follow_step_micro_batch_and_layer_alone() -> None:
    variants = variants_of(lambda: [Noisy(), Noisy(), nn.Linear(8, 4)], loss, BATCH)  # type: ignore[arg-type]
    first = variants.source.materialise(variants.source.params)
    code = variants.code("train", specs_of(BATCH), (), 0)
    tensors = [*(BATCH[k] for k in code.inputs), *(first[n] for n, _ in code.leaves)]

    def run(step: int, micro: int) -> float:
        torch.manual_seed(int(1000 * torch.rand(())))
        return code.forward(*tensors, step, micro)[0][0].item()

    found = [run(*where) for where in [(0, 0), (0, 1), (1, 0), (0, 0), (1, 0)]]
    assert found[0] == found[3]
    assert found[2] == found[4]
    assert len(set(found)) == 3
    state = torch.get_rng_state()
    code.forward(*tensors, 0, 0)
    assert torch.equal(state, torch.get_rng_state()), "torch's own generator is as before"
    one = staged(variants, (), BATCH)
    for cuts in every_cut(variants):
        assert differences(one, staged(variants, cuts, BATCH)) == []


class Two(Branch):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(left) * right


@pytest.mark.slow
def test_the_first_layer_takes_its_inputs_by_name() -> None:
    batch = {"right": BATCH["x"] + 1.0, "left": BATCH["x"], "y": BATCH["y"]}
    make: Callable[[], Any] = lambda: nn.Sequential(Two(), nn.Linear(8, 4))  # noqa: E731
    variants = variants_of(make, loss, batch)
    expected = plain(variants, make, batch)
    got = staged(variants, variants.graph.groups[1:2], batch)
    assert differences(expected, {n: g for n, g in got.items() if n in expected}) == []


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((8,), 0.7))
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x * self.factor)


class Within(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


@pytest.mark.slow
@pytest.mark.parametrize("made", [0, 1], ids=["layers as they are", "layers by a function"])
def test_a_part_that_is_in_eval_mode_stays_so(made: int) -> None:
    def mixed() -> nn.Sequential:
        torch.manual_seed(0)
        found = nn.Sequential(*layers(), nn.Dropout(0.5))
        found[2][0].eval()  # type: ignore[index]
        found[6].eval()
        return found

    variants = variants_of([mixed(), mixed][made], loss, BATCH)  # type: ignore[list-item]
    assert variants.primary.captured.written
    assert variants.primary.captured.updates == ()
    eager = mixed()
    first = variants.source.materialise([*variants.source.params, *variants.source.buffers])
    eager.load_state_dict(first)
    total, _ = loss(eager(BATCH["x"]), BATCH)
    code = variants.code("train", specs_of(BATCH), (), 0)
    leaves = [first[n] for n, _ in code.leaves]
    (mine, *_), _ = code.forward(
        *(BATCH[k] for k in code.inputs), *leaves, *(first[n] for n in code.buffers), 0, 0
    )
    assert torch.equal(mine, total)


class Twice(nn.Module):
    """One module with a parameter and a buffer under two names; a parameter that two modules have."""

    def __init__(self) -> None:
        super().__init__()
        inner = Scaled()
        self.first, self.second, self.tied = Within(inner), Within(inner), nn.Linear(8, 8)
        self.tied.weight = inner.lin.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.second(self.first(x * 1.5 if x.sum() > 0 else x)))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.slow
def test_a_layer_may_have_a_module_twice(mode: str) -> None:
    make = lambda: nn.Sequential(Twice(), Twice(), nn.Linear(8, 4))  # noqa: E731
    variants = variants_of(make, loss, BATCH)
    assert variants.anatomy(mode, specs_of(BATCH)).captured.written  # type: ignore[arg-type]
    expected = plain(variants, make, BATCH)
    for cuts in every_cut(variants):
        assert differences(expected, staged(variants, cuts, BATCH)) == [], cuts


class Reverses(torch.autograd.Function):
    """Gradient reversal (Ganin and Lempitsky 2015)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Reverse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Reverses.apply(x)


class Doubles(torch.autograd.Function):
    """Of what torch does not differentiate: it takes a list, or reads a layer beside its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Any, layer: nn.Module | None = None) -> Tensor:
        x = x[0] if isinstance(x, list) else x
        return 2.0 * (x if layer is None else layer(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class OfAList(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + Doubles.apply([y])


class BesideItsArguments(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + Doubles.apply(x, super().forward)


class AsAFunction(nn.Linear):
    """Its forward alone, which torch differentiates like any other."""

    def forward(self, x: Tensor) -> Tensor:
        return Doubles.apply(x) + Reverses.forward(None, super().forward(x))


@pytest.mark.parametrize("layer", [OfAList, BesideItsArguments, AsAFunction])
@pytest.mark.slow
def test_a_backward_that_torch_does_not_ask_is_no_hindrance(layer: type[nn.Module]) -> None:
    """What such a function reads has the gradient that torch gives it, or none."""
    make = lambda: nn.Sequential(layer(8, 8), nn.Linear(8, 4))  # noqa: E731
    variants = variants_of(make, loss, BATCH)
    assert not variants.primary.captured.written
    expected = plain(variants, make, BATCH)
    for cuts in every_cut(variants):
        assert differences(expected, staged(variants, cuts, BATCH)) == [], cuts
    assert "__getattribute__" not in vars(type(torch.autograd.Function))


class Infers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            z = self.lin(x) * 2.0
        return self.lin(x) + z


class Dampens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.1)
        return x


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_full_backward_hook(lambda _, grads, __: (0.1 * grads[0],))


@pytest.mark.parametrize("layer", [Reverse, Dampens, Hooked])
@pytest.mark.slow
def test_a_layer_may_have_a_backward_of_its_own(layer: type[nn.Module]) -> None:
    make = lambda: nn.Sequential(nn.Linear(8, 8), layer(), nn.Linear(8, 4))  # noqa: E731
    variants = variants_of(make, loss, BATCH)
    assert variants.primary.captured.written
    expected = plain(variants, make, BATCH)
    for cuts in every_cut(variants):
        assert differences(expected, staged(variants, cuts, BATCH)) == []


def with_shared() -> nn.Sequential:
    act, shared, inner = nn.Tanh(), nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(shared, act, inner, Branch(), shared, act, inner, nn.Linear(8, 4))


@pytest.mark.slow
def test_a_layer_that_comes_twice_runs_twice() -> None:
    variants = variants_of(with_shared, loss, BATCH)
    first = variants.source.materialise(variants.source.params)
    eager = with_shared()
    eager.load_state_dict({n: first[c] for n, c in variants.source.alias.items()})
    wanted, _ = loss(eager(BATCH["x"]), BATCH)
    wanted.backward()
    code = variants.code("train", specs_of(BATCH), (), 0)
    leaves = [first[n].requires_grad_() for n, _ in code.leaves]
    (got,), _ = code.forward(*(BATCH[k] for k in code.inputs), *leaves, 0, 0)
    got.backward()
    assert torch.equal(got, wanted)
    for name, p in eager.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(first[name].grad, p.grad)


# -- what is refused -----------------------------------------------------------------------------------


class Remembers(Branch):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))


class Writes(Remembers):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().sum(0))
        return super().forward(x)


class Assigns(Remembers):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().sum(0)
        return super().forward(x)


class TwoNorms(Branch):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(self.norm(x)))


class NoMomentum(TwoNorms):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=None)


class ReadsStatistics(TwoNorms):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x) + self.norm.running_mean)


class Fails(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(5, -1)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (Writes, r"layer 0 \(Writes\) changes \['seen'\] in place"),
        (Assigns, r"assigns the buffer 'seen' of Assigns"),
        (TwoNorms, r"runs the BatchNorm 'norm' 2 times"),
        (NoMomentum, "momentum=None"),
        (ReadsStatistics, r"(?s)test_layers.py.*layer 0 \(ReadsStatistics\) reads the statistics"),
        (Fails, r"(?s)test_layers.py.*layer 0 \(Fails\) cannot be run as it is written"),
    ],
)
@pytest.mark.slow
def test_what_a_layer_may_not_do(layer: type[nn.Module], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        _ = variants_of(lambda: nn.Sequential(layer(), nn.Linear(8, 4)), loss, BATCH).graph


class Shrinks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:3] if x.max() > 1e3 else x


class Skips(TwoNorms):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if x.sum() < 1e3 else x * (1 if x.sum() > 0 else 2)


@pytest.mark.parametrize(
    ("layer", "says"),
    [(Shrinks, r"layer 0 \(Shrinks\) returned .*, at capture"), (Skips, "ran the BatchNorms")],
)
@pytest.mark.slow
def test_what_changes_after_capture_is_refused_when_it_happens(layer: type[nn.Module], says: str) -> None:
    variants = variants_of(lambda: nn.Sequential(layer(), nn.Linear(8, 4)), summed, BATCH)
    staged(variants, (), BATCH)
    with pytest.raises(CaptureError, match=says):
        staged(variants, (), {**BATCH, "x": BATCH["x"].abs() * 1e4})


def summed(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    return outputs.sum(), 1.0


class Wrapped(nn.Module):
    """A part that cannot be traced, between others; `wide`: how much of the model these are."""

    def __init__(self, body: nn.Module | None = None, wide: int = 32) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(8, wide), nn.Linear(wide, 8), body or Branch()
        self.body.register_forward_hook(lambda _, __, out: out * 0.5)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.down(self.up(x)))
        return self.last(torch.relu(x + self.body(x)))


class Passes(nn.Module):
    """Returns what it was given, most of the time; what follows writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.wide = nn.Sequential(nn.Linear(8, 99), nn.Linear(99, 8))
        self.clip, self.last = Clip(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.clip(self.wide(x))))


class Clip(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(-9, 9) if x.abs().max() > 9 else x


class Lists(nn.Module):
    """An LSTM, whose weights are in a list beside, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(8, 99), nn.Linear(99, 8))
        self.body, self.last = Recurs(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.wide(x)))


class Recurs(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y, _ = super().forward(x[:, None])
        return y[:, 0] if y.sum() > 0 else -y[:, 0]


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        (grad,) = torch.autograd.grad(torch.tanh(self.lin(x)).sum(), x, create_graph=True)
        return grad


class Maps(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch.tanh(super(Maps, self).forward(row)))(x)


@pytest.mark.parametrize(
    ("body", "precision"),
    [
        *((body, "fp32") for body in (Branch, Reverse, Dampens, Hooked, Twice, Forces, Maps, Infers)),
        (Branch, "bf16"),
    ],
)
@pytest.mark.slow
def test_a_part_of_any_model_runs_as_it_is_written(body: type[nn.Module], precision: str) -> None:
    make = lambda: Wrapped(body())  # noqa: E731
    variants = variants_of(make, loss, BATCH, precision)
    assert set(variants.primary.captured.written) == {"model.body"}
    expected = plain(variants, make, BATCH)
    for cuts in every_cut(variants):
        got = staged(variants, cuts, BATCH)
        assert differences(expected, {n: g for n, g in got.items() if n in expected or g.any()}) == [], cuts


@pytest.mark.parametrize("make", [Passes, Lists])
@pytest.mark.slow
def test_a_part_may_return_what_it_was_given_or_be_an_lstm(make: type[nn.Module]) -> None:
    variants = variants_of(make, loss, BATCH)
    assert len(variants.primary.captured.written) == 1
    expected = plain(variants, make, BATCH)
    for cuts in every_cut(variants):
        assert differences(expected, staged(variants, cuts, BATCH)) == [], cuts


class Repeated(nn.Module):
    """Parts of one class, one of them inside of a region without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(8, 99), nn.Linear(99, 8))
        self.parts = nn.ModuleList(Branch() for _ in range(3))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(x)
        for part in self.parts[:2]:
            x = part(x)
        with torch.no_grad():
            fixed = self.parts[2](x)
        return self.last(x + fixed)


@pytest.mark.slow
def test_parts_of_one_class_run_alike() -> None:
    variants = variants_of(Repeated, loss, BATCH)
    assert set(variants.primary.captured.written) == {f"model.parts.{i}" for i in range(3)}
    assert set(variants.unused) == {n for n in variants.source.params if n.startswith("parts.2.")}
    expected = plain(variants, Repeated, BATCH)
    for cuts in every_cut(variants):
        got = staged(variants, cuts, BATCH)
        assert differences(expected, {n: g for n, g in got.items() if n in expected or g.any()}) == [], cuts


def of_chosen(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of samples that the labels choose."""
    chosen = batch["y"] > 0
    return nn.functional.cross_entropy(outputs[chosen], batch["y"][chosen], reduction="sum"), chosen.sum()


def of_count(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    total, weight = of_chosen(outputs, batch)
    return total, int(weight)


def of_three(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    losses = nn.functional.cross_entropy(outputs, batch["y"], reduction="none")
    return torch.stack(sorted(losses, key=float)[:3]).sum(), 3.0


@pytest.mark.parametrize("of", [of_chosen, of_three, of_count])
@pytest.mark.slow
def test_a_loss_runs_as_it_is_written(of: Any) -> None:
    variants = variants_of(model, of, BATCH)
    assert set(variants.primary.captured.written) == {"loss", "model.1"}
    eager = model()
    first = variants.source.materialise([*variants.source.params, *variants.source.buffers])
    eager.load_state_dict(first)
    total, weight = of(eager(BATCH["x"]), BATCH)
    total.backward()
    expected = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
    expected["loss"] = total.detach()
    for cuts in every_cut(variants):
        got = staged(variants, cuts, BATCH)
        assert differences(expected, {n: g for n, g in got.items() if n in expected or g.any()}) == [], cuts
    found = variants.weight("train", specs_of(BATCH))
    if isinstance(found, Code):
        (found,), _ = found.forward(*(BATCH[k] for k in found.inputs))
    assert float(found) == float(weight)


def of_outputs(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    sure = outputs.max(-1).values > 0
    return nn.functional.cross_entropy(outputs[sure], batch["y"][sure], reduction="sum"), sure.sum()


def of_shares(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """That refuses what is no share; runs of a part before are made up, too."""
    chosen = batch["y"] > 0
    shares, wanted = outputs[chosen], nn.functional.one_hot(batch["y"][chosen], 4).float()
    return nn.functional.binary_cross_entropy(shares, wanted, reduction="sum"), chosen.sum()


@pytest.mark.slow
def test_a_loss_of_shares_runs_as_it_is_written() -> None:
    make = lambda: nn.Sequential(nn.Linear(8, 4), nn.Sigmoid())  # noqa: E731
    variants = variants_of(make, of_shares, BATCH)  # type: ignore[arg-type]
    assert set(variants.primary.captured.written) == {"loss"}
    expected = plain(variants, make, BATCH)
    assert differences(expected, staged(variants, (), BATCH)) == []


class WritesInput(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.tanh_())


class WritesLater(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp_(-1.0, 1.0) if x.abs().max() > 1e3 else x)


class Leaves(Branch):
    """Something that the model reads: a tensor, a number."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.size, self.sign = y.square().mean(), 1.0 if x.sum() > 0 else -1.0
        return y


class Reads(Wrapped):
    def __init__(self, name: str) -> None:
        super().__init__(Leaves())
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.body, self.name)


class Fills(Branch):
    def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        found.append(y.mean())
        return y


class Gives(Wrapped):
    def __init__(self) -> None:
        super().__init__(Fills())

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        return self.last(self.body(self.down(self.up(x)), found)) + sum(found)


class WritesResult(Wrapped):
    def __init__(self) -> None:
        super().__init__(Clip())
        self.body._forward_hooks.clear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.up(x))
        return self.last(x + self.body(x).mul_(3.0))


class Sets(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        self.body.scale = x.mean()
        return super().forward(x)


class Asks(Wrapped):
    """As models of experts sum up what their parts have left."""

    def __init__(self) -> None:
        super().__init__(Leaves())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        left = [m.size for m in self.modules() if isinstance(getattr(m, "size", None), Tensor)]
        return y * (1.0 + sum(left))


class LeavesInside(Branch):
    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[str, list[float]] = {"aux": []}

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.losses["aux"].append(float(y.mean()))
        return y


class ReadsInside(Wrapped):
    def __init__(self) -> None:
        super().__init__(LeavesInside())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * sum(self.body.losses["aux"])  # type: ignore[union-attr,index,arg-type]


ELSEWHERE = nn.Parameter(torch.ones(8))


class Strange(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * ELSEWHERE


class Normed(Branch):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class ReadsOutside(Wrapped):
    def __init__(self) -> None:
        super().__init__(Normed())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - self.body.norm.running_mean[:4]  # type: ignore[union-attr,index]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: Wrapped(WritesInput()),
            r"test_layers.py.*body \(WritesInput\) writes into what it is given",
        ),
        (lambda: nn.Sequential(Wrapped(WritesInput())), r"0.body .WritesInput. writes into what it is given"),
        (lambda: Reads("size"), r"test_layers.py.*body \(Leaves\) leaves 'size' behind"),
        (lambda: Reads("sign"), r"test_layers.py.*body \(Leaves\) leaves 'sign' behind"),
        (Gives, r"test_layers.py.*body \(Fills\) changes a list or dict"),
        (lambda: Sets(Branch()), r"test_layers.py.*sets 'scale' of 'body' before"),
        (Asks, r"test_layers.py.*body \(Leaves\) leaves 'size' behind"),
        (ReadsInside, r"test_layers.py.*body \(LeavesInside\) leaves 'losses' behind"),
        (WritesResult, r"body \(Clip\) returned what it was given"),
        (lambda: Wrapped(Strange()), r"test_layers.py.*shape \[8\] that wants a gradient"),
        (ReadsOutside, r"test_layers.py.*reads 'body.norm.running_mean'"),
    ],
    ids=[
        *("input", "input in a list", "tensor", "number", "list", "set before", "by its class", "inside"),
        *("result", "weight", "statistics"),
    ],
)
@pytest.mark.slow
def test_what_a_graph_would_not_see_of_a_part_is_refused(make: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=f"(?s){says}"):
        staged(variants_of(make, loss, BATCH), (), BATCH)


@pytest.mark.slow
def test_what_a_part_leaves_for_itself_may_stay() -> None:
    variants = variants_of(lambda: Wrapped(Leaves()), loss, BATCH)
    expected, got = plain(variants, lambda: Wrapped(Leaves()), BATCH), staged(variants, (), BATCH)
    assert differences(expected, {n: g for n, g in got.items() if n in expected or g.any()}) == []


@pytest.mark.slow
def test_a_part_that_writes_into_its_input_later_is_refused_then() -> None:
    variants = variants_of(lambda: Wrapped(WritesLater()), loss, BATCH)
    with pytest.raises(CaptureError, match="writes into what it is given, and at capture it did not"):
        staged(variants, (), {**BATCH, "x": BATCH["x"] * 1e6})


@pytest.mark.slow
def test_the_weight_of_a_loss_that_runs_as_it_is_written_comes_from_the_batch() -> None:
    variants = variants_of(model, of_outputs, BATCH)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"weight of the loss .*test_layers.py.* depends on the outputs"):
        staged(variants, (), BATCH)


@pytest.mark.slow
def test_a_batch_norm_inside_and_outside_of_a_part_is_updated_in_order() -> None:
    class Both(Wrapped):
        def __init__(self) -> None:
            super().__init__(Normed())

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.body.norm(x))  # type: ignore[union-attr,operator]

    captured = variants_of(Both, loss, BATCH).primary.captured
    found = [
        captured.name[u.node].partition("/")[0]
        for u in captured.updates
        if u.buffer == "body.norm.running_mean"
    ]
    assert found == ["body.norm", "body"]


def test_most_of_a_model_does_not_run_as_it_is_written() -> None:
    with pytest.raises(CaptureError, match=r"(?s)decides on the values.*an nn.Module of its own") as e:
        _ = variants_of(lambda: Wrapped(wide=1), loss, BATCH).graph
    source, start = inspect.getsourcelines(Branch)
    assert f'File "{__file__}", line {start + len(source) - 3}' in str(e.value)
    with pytest.raises(CaptureError, match="layer 1 of the list of layers"):
        variants_of(lambda: [nn.Linear(8, 4), torch.relu], loss, BATCH)  # type: ignore[arg-type,list-item,return-value]


# -- what a list of layers does beside them ------------------------------------------------------------------


def halved_inside() -> nn.Sequential:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 4))
    model[0].register_forward_hook(lambda module, given, out: out * 0.5)
    return model


def halved() -> nn.Sequential:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 4))
    model.register_forward_hook(lambda module, given, out: out * 0.5)
    return model


def doubled_before() -> nn.Sequential:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 4))
    model[0].register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    return model


def another_way() -> nn.Sequential:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4))
    inner = model[0]
    inner.forward = lambda x: x + inner[1](inner[0](x))  # type: ignore[method-assign, assignment]
    return model


@pytest.mark.parametrize("make", [halved_inside, halved, doubled_before, another_way])
def test_hooks_and_a_forward_of_its_own_are_part_of_a_list(make: Callable[[], nn.Sequential]) -> None:
    variants, model = variants_of(make, loss, BATCH), make()
    first = variants.source.materialise(variants.source.params)
    model.load_state_dict(first)
    code = variants.code("predict", specs_of(BATCH), (), 0)
    (found,), _ = code.forward(*(BATCH[k] for k in code.inputs), *(first[n] for n, _ in code.leaves))
    assert torch.equal(found, model(BATCH["x"]))


class Seeded(nn.Module):
    """The same noise each time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            noise = torch.randn(x.shape)
        return self.inner(x + noise)


def test_a_layer_that_seeds_its_noise_runs_as_it_is_written() -> None:
    variants = variants_of(lambda: nn.Sequential(Seeded(), nn.Linear(8, 4)), loss, BATCH)
    (why,) = variants.primary.captured.written.values()
    assert why.endswith("torch.manual_seed(5)")
    first = variants.source.materialise(variants.source.params)
    code = variants.code("train", specs_of(BATCH), (), 0)
    given = [*(BATCH[k] for k in code.inputs), *(first[n] for n, _ in code.leaves)]
    found = [code.forward(*given, *(where if code.random else ()))[0][0] for where in [(0, 0), (1, 1)]]
    model = nn.Sequential(Seeded(), nn.Linear(8, 4))
    model.load_state_dict(first)
    assert [x.item() for x in found] == [loss(model(BATCH["x"]), BATCH)[0].item()] * 2
