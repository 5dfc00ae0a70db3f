"""What the captured graph of a model is called, and which models are refused with which words."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny import SHAPES, capture, captured, full_but
from torch import Tensor, nn
from torch.distributions import Distribution, Normal, kl_divergence
from torch.utils._pytree import tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from mpipipe.errors import CaptureError, PlanError
from mpipipe.graph.anatomy import Anatomy
from mpipipe.graph.capture import Batch
from mpipipe.graph.capture import capture as capture_one
from mpipipe.graph.cut import Code, extract, weight_code
from mpipipe.graph.pieces import pieces
from mpipipe.graph.source import ModelSource
from mpipipe.graph.steady import Steady
from mpipipe.graph.variants import Variants
from mpipipe.models.losses import cross_entropy, from_mean
from mpipipe.values import TensorSpec, from_json, to_json


def names(model: str, mode: Any, rows: int) -> list[str]:
    variants = captured(model, 2)
    anatomy = variants.anatomy(mode, variants.specs(rows))
    return [anatomy.captured.name[n] for n in anatomy.order]


@pytest.mark.slow
def test_names_are_module_path_operator_and_ordinal() -> None:
    found = names("gpt", "train", 2)
    assert found[:3] == ["wte/embedding.0", "wpe/embedding.0", "/add.0"]
    assert "blocks.1.attn.qkv/linear.0" in found
    assert found[-1] == "loss/cross_entropy_loss.0"
    assert len(set(found)) == len(found)
    op = {n.name: n.op for n in captured("gpt", 2).graph.nodes}
    assert op["wte/embedding.0"] == "aten.embedding.default"
    assert op["drop/dropout.0"] == "aten.dropout.default"  # whatever computes it


@pytest.mark.parametrize("model", full_but(["gpt", "traps"], SHAPES))
@pytest.mark.slow
def test_names_do_not_depend_on_batch_size_or_mode(model: str) -> None:
    train = names(model, "train", 2)
    assert names(model, "train", 3) == train
    rest = {"eval": names(model, "eval", 3), "predict": names(model, "predict", 1)}
    for mode, found in rest.items():
        shared = [n for n in train if n in set(found)]
        assert [n for n in found if n in set(train)] == shared, f"{mode}: another order"
        assert len(shared) == len(found), f"{mode}: names of its own"


@pytest.mark.parametrize("model", full_but(["gpt", "traps"], SHAPES))
@pytest.mark.slow
def test_the_graph_says_nothing_of_the_process_that_made_it(model: str) -> None:
    """Its hash and the keys of its pieces are compared between ranks."""
    one, other = captured(model, 2), capture(model, 2)
    text = to_json(one.graph)
    assert not re.search(r"0x[0-9a-f]{6}", text)
    assert from_json(type(one.graph), text) == one.graph
    assert one.graph.hash == other.graph.hash
    keys = [[p.key for p in pieces(v.primary, v.graph, v.uses)] for v in (one, other)]
    assert keys[0] == keys[1]


# -- what is refused -----------------------------------------------------------------------------------

SPECS = {"x": TensorSpec((2, 4), "float32"), "y": TensorSpec((2,), "int64")}


def sum_and_count(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor | float]:
    return outputs.sum(), float(batch["y"].numel())


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class Branches(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if x.sum() > 0 else x  # here


class Loops(Base):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.sum())):  # here
            x = self.lin(x)
        return x


class Reads(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * x.sum().item()  # here


class Scales(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9)  # here
        return self.lin(x) + self.seen


class CountsTwo(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 2  # here
        return self.lin(x)


class CountsTwiceOne(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1, alpha=2)  # here
        return self.lin(x)


class WritesThroughView(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen[1:].add_(1)  # here
        return self.lin(x) + self.seen


class WritesElements(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen[0] = x[0, 0].detach()  # here
        return self.lin(x) + self.seen


class Assigns(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + x.mean(0)  # here
        return self.lin(x)


class WritesByName(Base):
    def forward(self, x: Tensor) -> Tensor:
        torch.add(self.seen, 1.0, out=self.seen)  # here
        return self.lin(x)


class WritesAList(Base):
    def forward(self, x: Tensor) -> Tensor:
        torch._foreach_add_([self.seen], 1.0)  # here
        return self.lin(x)


class WritesData(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        torch.tanh(x.detach(), out=x.data)  # here
        return x


class SpectralNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)  # here


class WritesWeights(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.lin.weight.detach().mul_(0.5)  # here
        return self.lin(x)


class Attribute(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.rand(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.scale  # here


class Poisson(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + torch.poisson(x.abs())  # here


class Rounds(torch.autograd.Function):
    """Straight through, as quantised models have it (Bengio et al. 2013)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


rounds = Rounds.apply  # as many keep it


class StraightThrough(Base):
    def forward(self, x: Tensor) -> Tensor:
        return rounds(self.lin(x))  # here


class Hooks(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.1)  # here
        return x


class Infers(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():  # here
            z = self.lin(x)
        return self.lin(x) + z


class ComputesAgain(Base):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.lin, x * self.lin.weight[0, 0], use_reentrant=True)  # here


REFUSED: dict[type[nn.Module], str] = {
    StraightThrough: "Rounds, a torch.autograd.Function, has a backward of its own",
    Hooks: "registers a hook on the gradient of a tensor",
    Infers: "use torch.no_grad\\(\\)",
    ComputesAgain: "use_reentrant=True cannot be captured",
    Branches: "torch.where",
    Loops: "torch.where|compute with tensors",
    Reads: "compute with tensors instead of `.item\\(\\)`",
    Scales: "'seen'.* in place by aten.mul_",
    CountsTwo: "'count'.* in place by aten.add_",
    CountsTwiceOne: "'count'.* in place by aten.add_",
    WritesThroughView: "'seen'.* in place by aten.add_",
    WritesElements: "'seen'.* in place by aten.copy_",
    WritesByName: "'seen'.* in place by aten.add.out",
    WritesAList: "'seen'.* in place by aten._foreach_add_",
    WritesData: "no operator makes in the graph, as `x.data` is; use `x.detach\\(\\)`",
    SpectralNorm: "'lin.parametrizations.weight.0._u'.* in place by aten.div.out",
    Assigns: "assigns the buffer 'seen' of Assigns",
    WritesWeights: "'lin.weight'.* in place by aten.mul_",
    Attribute: "'scale' is drawn at random when the model is made",
    Poisson: "aten.poisson.default, which has no reproducible twin",
}


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.__name__)
@pytest.mark.slow
def test_what_cannot_be_captured_is_refused_with_the_user_s_line(model: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match=REFUSED[model]) as caught:
        capture_one(ModelSource(model, 0), sum_and_count, SPECS, "train")
    source, start = inspect.getsourcelines(model)
    line = start + next(i for i, text in enumerate(source) if "# here" in text)
    assert f'File "{__file__}", line {line}' in str(caught.value)


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Base()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.slow
def test_hooks_on_gradients_are_refused_by_name() -> None:
    model = Outside()
    hook = model.inner.lin.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"'inner.lin', a Linear, has a backward hook"):
        capture_one(ModelSource(model, 0), sum_and_count, SPECS, "train")
    hook.remove()
    hook = model.inner.lin.weight.register_hook(lambda grad: grad * 0.0)
    with pytest.raises(CaptureError, match=r"'inner.lin.weight' has a hook on its gradient"):
        ModelSource(model, 0)
    hook.remove()
    capture_one(ModelSource(model, 0), sum_and_count, SPECS, "train")


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name(layer: Any) -> None:
    """Of what is trained."""
    model = nn.Sequential(nn.Sequential(layer(8, 4, sparse=True)), nn.Linear(4, 4))
    specs = {"input": TensorSpec((3, 2), "int64"), "y": TensorSpec((3,), "float32")}
    says = rf"'0.0', a {layer.__name__}, has sparse=True, .*; make it with sparse=False"
    with pytest.raises(CaptureError, match=says):
        capture_one(ModelSource(model, 0), sum_and_count, specs, "train")
    capture_one(ModelSource(model, 0), sum_and_count, specs, "predict")
    model[0].requires_grad_(False)
    capture_one(ModelSource(model, 0), sum_and_count, specs, "train")


class OwnWithoutGradient(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = rounds(self.lin(x)) + 1.0
        return checkpoint(self.lin, rounds(x) * scale, use_reentrant=False)


@pytest.mark.slow
def test_a_backward_that_is_not_called_is_no_reason_to_refuse() -> None:
    capture_one(ModelSource(OwnWithoutGradient, 0), sum_and_count, SPECS, "train")
    for mode in ("eval", "predict"):
        capture_one(ModelSource(StraightThrough, 0), sum_and_count, SPECS, mode)  # type: ignore[arg-type]
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: 2 * grad)  # torch is as before
    rounds(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


class CountsInPython(Base):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.lin(x) / self.calls


class DropsInPython(Base):
    rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = x if random.random() < self.rate else self.lin(x)
        return x


class NoiseOfNumPy(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + torch.from_numpy(np.random.rand(4)).float()


class FirstTime(Base):
    seen_one = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x) if self.seen_one else x
        self.seen_one = True
        return self.lin(x)


class Remembers(Base):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) if self.last is None else self.lin(x) + self.last
        self.last = y.mean().detach()
        return y


class ShowsItsMap(Base):
    """What it keeps, it does not read."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.first = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        self.map = self.lin(x).detach()
        return self.lin(x)


def test_a_tensor_that_a_layer_remembers_is_refused_and_one_that_it_shows_is_not() -> None:
    def by_layer(model: type[nn.Module]) -> None:
        layers = ModelSource(lambda: nn.Sequential(model(), nn.Identity()), 0)
        capture_one(layers, sum_and_count, SPECS, "train", written={"model.0": "it is given"})

    with pytest.raises(
        CaptureError, match=r"layer 0 \(Remembers\) is another one the second time, by 'last'"
    ):
        by_layer(Remembers)
    by_layer(ShowsItsMap)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (CountsInPython, "changes 'calls' in forward, each time anew"),
        (DropsInPython, "another one the second time, by random numbers of Python or NumPy"),
        (NoiseOfNumPy, "another one the second time, by random numbers of Python or NumPy"),
        (FirstTime, "another one the second time, by 'seen_one'"),
    ],
)
@pytest.mark.slow
def test_a_forward_that_is_another_one_each_time_is_refused(model: type[nn.Module], says: str) -> None:
    with pytest.raises(CaptureError, match=f"the model, or the loss, .*{says}"):
        capture_one(ModelSource(model, 0), sum_and_count, SPECS, "train")
    layers = ModelSource(lambda: nn.Sequential(model(), nn.Identity()), 0)
    with pytest.raises(CaptureError, match=rf"layer 0 \({model.__name__}\) .*{says}"):
        capture_one(layers, sum_and_count, SPECS, "train", written={"model.0": "it is given"})


class Keeps(DropsInPython):
    """A size that is kept, and draws that decide nothing, as in models that drop no layer."""

    rate, longest = 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.longest = max(self.longest, x.shape[1])
        return super().forward(x)


@pytest.mark.parametrize("written", [{}, {"model.0": "it is given"}])
@pytest.mark.slow
def test_what_python_keeps_and_draws_may_decide_nothing(written: dict[str, str]) -> None:
    source = ModelSource(lambda: nn.Sequential(Keeps(), nn.Identity()), 0)
    capture_one(source, sum_and_count, SPECS, "train", written=written)


RATE, CALLS = 0.5, 0


def rated(total: Tensor) -> Tensor:
    return RATE * total


class Weighted:
    """A loss with numbers of its own and of its file, and with some that it does not read."""

    def __init__(self) -> None:
        self.beta, self.step, self.calls = 1.0, 0, 0

    def __call__(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, float]:
        global CALLS
        CALLS, self.calls = CALLS + 1, self.calls + 1
        return rated(self.scaled(outputs.sum())), 1.0

    def scaled(self, total: Tensor) -> Tensor:
        return self.beta * total


def test_a_number_of_the_loss_that_changes_after_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weighted, beta = Weighted(), 1.0

    def around(outputs: Tensor, batch: Batch) -> tuple[Tensor, float]:
        total, weight = weighted(outputs, batch)
        return beta * total + (later if beta < 0 else 0.0), weight

    losses = {
        "object": weighted,
        "method": weighted.__call__,
        "around": around,
        "mean": from_mean(lambda outputs, batch: beta * outputs.mean(), lambda batch: 1.0),
        "part": partial(around),
    }
    steady = {name: Steady(loss) for name, loss in losses.items()}
    before = {name: of.values() for name, of in steady.items()}
    capture_one(ModelSource(Base, 0), around, SPECS, "train")
    for name, of in steady.items():
        of.captured(before[name])
        of.check()

    def refused(*names: str, match: str) -> None:
        for name, of in steady.items():
            with pytest.raises(CaptureError, match=match) if name in names else nullcontext():
                of.check()

    weighted.calls, weighted.step = 9, 3
    refused(match="")
    weighted.beta = 0.5
    refused(
        "object",
        "method",
        "around",
        "part",
        match=r"'Weighted.beta', which the loss reads, was 1.0 .* 0.5 now",
    )
    weighted.beta, beta = 1.0, 2.0
    refused("around", "mean", "part", match=r"'beta', which the loss reads, was 1.0 .* is 2.0 now")
    beta = 1.0
    monkeypatch.setitem(globals(), "RATE", 0.25)
    refused(
        "object", "method", "around", "part", match=r"'RATE', which the loss reads, was 0.5 .* is 0.25 now"
    )
    later = 1.0


class Counts(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.lin(x)


def test_a_counter_is_an_update_and_no_operator() -> None:
    found = capture_one(ModelSource(Counts, 0), sum_and_count, SPECS, "train")
    assert [(u.buffer, u.momentum, u.statistic) for u in found.updates] == [("count", None, None)]
    assert [found.name[n] for n in Anatomy(found).operators] == ["lin/linear.0", "loss/sum.0"]


CE = nn.functional.cross_entropy
BAD_LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "no pair": (lambda out, _: out.mean(), r"^the loss .* returned one tensor .* return the summed loss and"),
    "three": (lambda out, _: (out.sum(), 1.0, 2.0), rf'loss \(File "{__file__}", line \d+\) returned'),
    "a mean": (
        lambda out, b: (out.mean(), b["y"].sum() * 1.0),
        rf'"{__file__}", .*, but aten::mean takes a mean',
    ),
    "a mean over all dimensions": (lambda out, b: (out.mean((0, 1)).double(), b["y"].sum()), "takes a mean"),
    "a loss with its default": (lambda out, b: (CE(out, b["y"]), (b["y"] > 0).sum()), "weight_of"),
    "a mean with a number": (lambda out, b: (CE(out, b["y"]), len(b["y"])), "weight_of"),
    "a sum of means": (lambda out, b: (out.sum() - CE(out, b["y"]).view(()), (b["y"] > 0).sum()), "a mean"),
    "a mean by hand": (lambda out, _: (out.sum() / 64, 64.0), "aten::div divides by that weight"),
    "a masked mean by hand": (
        lambda out, b: (out.sum() / (b["y"] > 0).sum(), (b["y"] > 0).sum()),
        "divides by that weight",
    ),
    "a vector": (lambda out, _: (out.sum(1), 1.0), r"in the loss\n  the loss sum has shape \(2,\)"),
    "an integer": (lambda out, _: ((out > 0).sum(), 1.0), "dtype torch.int64"),
}


def misspelt(out: Tensor, b: dict[str, Tensor]) -> tuple[Tensor, int]:
    return CE(out, b["labelz"], reduction="sum"), len(out)


def of_no_use(out: Tensor, b: dict[str, Tensor]) -> tuple[Tensor, int]:
    return out.sum().no_such_method(), len(b)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (misspelt, r"""KeyError: 'labelz'; the batch has the keys \['x', 'y'\]\n.*itself: mend that line"""),
        (of_no_use, r"no_such_method'\n  the model or the loss raised this itself"),
    ],
)
def test_a_slip_in_the_loss_gets_no_advice_about_models(loss: Callable[..., Any], says: str) -> None:
    with pytest.raises(CaptureError, match=says) as caught:
        capture_one(ModelSource(Base, 0), loss, SPECS, "train")
    assert str(caught.value).startswith(f'File "{__file__}", line ')
    assert "layers" not in str(caught.value)


def test_a_batch_without_labels_is_refused_with_no_line_but_the_user_s() -> None:
    """The loss that comes with mpipipe need not be mended; the line that calls it may."""

    def mine(out: Tensor, b: dict[str, Tensor]) -> Any:
        return cross_entropy(out, b)

    without = {"x": SPECS["x"]}
    with pytest.raises(CaptureError) as caught:
        capture_one(ModelSource(Base, 0), cross_entropy, without, "train")
    needs = "the loss needs the key 'labels' (or 'y'); the batch has ['x']; let the data return it "
    assert str(caught.value).startswith(needs)
    with pytest.raises(CaptureError) as caught:
        capture_one(ModelSource(Base, 0), mine, without, "train")
    assert str(caught.value).startswith(f'File "{__file__}", line ')
    assert f": return cross_entropy(out, b)\n  {needs}" in str(caught.value)


@pytest.mark.parametrize("what", BAD_LOSSES)
def test_a_loss_of_another_form_is_refused(what: str) -> None:
    loss, says = BAD_LOSSES[what]
    with pytest.raises(CaptureError, match=says):
        capture_one(ModelSource(Base, 0), loss, SPECS, "train")


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(), nn.functional.cross_entropy, nn.MSELoss()],
    ids=["module", "function", "mean"],
)
def test_a_loss_of_torch_s_own_is_told_what_it_is_called_with(loss: Any) -> None:
    says = (
        r"loss is torch's .*called as loss\(outputs, batch\), and batch is a dict .* `lambda outputs, batch"
    )
    with pytest.raises(CaptureError, match=says):
        capture_one(ModelSource(Base, 0), loss, SPECS, "train")
    with pytest.raises(CaptureError, match=says):
        from_mean(loss, lambda batch: 1.0)


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.tensor(2.0))

    def forward(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, float]:
        return (outputs * self.t).sum(), 2.0


HEAD = nn.Linear(4, 4)


class Variational(Base):
    def forward(self, x: Tensor) -> Tensor:
        assert not torch.compiler.is_exporting()  # which is for other shapes
        found, wanted = Normal(self.lin(x), self.lin(x).exp()), Normal(0.0, 1.0)
        return kl_divergence(found, wanted) + found.rsample()


@pytest.mark.slow
def test_distributions_do_not_look_at_values_in_a_trace() -> None:
    checks, exporting = Distribution._validate_args, torch.compiler.is_exporting
    source = ModelSource(Variational, 0)
    assert capture_one(source, sum_and_count, SPECS, "train").rng, "the draw is one of ours"
    with pytest.raises(CaptureError):
        capture_one(ModelSource(Branches, 0), sum_and_count, SPECS, "train")
    assert Distribution._validate_args is checks
    assert torch.compiler.is_exporting is exporting


class Unregistered(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.LayerNorm(4)]  # as an nn.ModuleList it would be one of the model's

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.lin(x))


@pytest.mark.parametrize(
    ("model", "loss", "metrics"),
    [
        (Base, Temperature(), {}),
        (Base, lambda out, _: (HEAD(out).sum(), 2.0), {}),
        (Base, sum_and_count, {"m": lambda out, _: ((out * HEAD.weight).sum(), 2.0)}),
        (Unregistered, sum_and_count, {}),
        (Unregistered(), sum_and_count, {}),
    ],
)
def test_weights_that_nothing_would_train_are_refused(model: Any, loss: Any, metrics: Any) -> None:
    specs = {"x": TensorSpec((4, 4), "float32"), "y": SPECS["y"]}
    with pytest.raises(CaptureError, match=r"test_capture.py(?s:.*)shape \[.*\] that wants a gradient"):
        capture_one(ModelSource(model, 0), loss, specs, "eval" if metrics else "train", metrics=metrics)


@pytest.mark.slow
def test_frozen_weights_of_a_loss_are_constants() -> None:
    def distills(outputs: Tensor, batch: Batch) -> tuple[Tensor, float]:
        with torch.no_grad():
            wanted = HEAD(batch["x"])
        return (outputs - wanted - frozen(batch["x"]).sum()).sum() + HEAD.weight.detach().sum(), 2.0

    frozen = Temperature().requires_grad_(False)
    frozen.forward = lambda x: x * frozen.t  # type: ignore[method-assign, assignment]
    capture_one(ModelSource(Base, 0), distills, SPECS, "train")
    capture_one(ModelSource(Base, 0), Temperature().requires_grad_(False), SPECS, "train")


GOOD_LOSSES: dict[str, Callable[..., Any]] = {
    "a mean times its weight": lambda out, b: (CE(out, b["y"]) * b["y"].sum(), b["y"].sum()),
    "half of a sum": lambda out, b: (out.sum() / 2, len(b["y"])),
    "a mean per sample": lambda out, b: (out.mean(-1).sum(), (b["y"] >= 0).sum()),
    "a plain mean of micro-batches": lambda out, b: (CE(out, b["y"]), 1.0),
    "a sum": lambda out, b: (CE(out, b["y"], reduction="sum"), (b["y"] >= 0).sum()),
}


@pytest.mark.parametrize("what", GOOD_LOSSES)
@pytest.mark.slow
def test_a_sum_may_have_means_inside(what: str) -> None:
    one_row = {k: TensorSpec((1, *s.shape[1:]), s.dtype) for k, s in SPECS.items()}
    for specs in (SPECS, one_row):
        capture_one(ModelSource(Base, 0), GOOD_LOSSES[what], specs, "train")


def weight_of(loss: Callable[..., Any]) -> Code | float:
    return weight_code(Anatomy(capture_one(ModelSource(Base, 0), loss, SPECS, "train")))


def test_a_weight_that_depends_on_the_outputs_is_refused() -> None:
    with pytest.raises(PlanError, match="depends on the model's outputs"):
        weight_of(lambda out, batch: (out.sum(), (out > 0).sum()))
    with pytest.raises(PlanError, match="depends on the model's outputs"):
        weight_of(lambda out, batch: (out.sum(), out.detach().abs().sum() + batch["y"].numel()))


@pytest.mark.slow
def test_a_weight_is_a_number_or_a_function_of_the_batch() -> None:
    assert weight_of(lambda out, batch: (out.sum(), 3)) == 3.0
    batch = {"x": torch.arange(8.0).view(2, 4), "y": torch.tensor([1, -100])}
    for loss, keys, expected in (
        (lambda out, b: (out.sum(), (b["y"] != -100).sum()), ("y",), 1.0),
        (lambda out, b: (out.sum(), b["x"].sum() * 2.0), ("x",), 56.0),  # a weight per sample, as floats
    ):
        code = weight_of(loss)
        assert isinstance(code, Code)
        assert code.inputs == keys
        (value,), _ = code.forward(*(batch[k] for k in code.inputs))
        assert float(value) == expected


# -- what a forward takes and gives --------------------------------------------------------------------


class TakesTwo(Base):
    def forward(self, x: Tensor, mask: Tensor, scale: Tensor | None = None) -> Tensor:
        return self.lin(x) * mask if scale is None else self.lin(x) * scale


class TakesAny(Base):
    def forward(self, x: Tensor, **rest: Tensor) -> Tensor:
        assert set(rest) == {"y"}
        return self.lin(x)


class OnlyDefaults(Base):
    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        assert input_ids is not None
        return self.lin(input_ids)


class Starred(Base):
    def forward(self, *inputs: Tensor) -> Tensor:
        return self.lin(inputs[0])


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (TakesTwo, r"TakesTwo.forward needs \['mask'\], but the batch has the keys \['x', 'y'\]"),
        (OnlyDefaults, r"takes \['input_ids', 'attention_mask'\], but the batch has the keys"),
        (Starred, "takes arguments without a name"),
    ],
)
def test_a_batch_that_does_not_fit_forward_is_refused(model: type[nn.Module], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        capture_one(ModelSource(model, 0), sum_and_count, SPECS, "train")


@pytest.mark.slow
def test_batch_keys_are_parameters_of_forward() -> None:
    with_mask = {**SPECS, "mask": TensorSpec((2, 4), "float32")}
    found = capture_one(ModelSource(TakesTwo, 0), sum_and_count, with_mask, "train")
    assert {key for n, key in found.inputs.items() if n.users} == {"x", "mask"}
    capture_one(ModelSource(TakesAny, 0), sum_and_count, SPECS, "train")
    layers = ModelSource(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 0)  # its parameter is "input"
    found = capture_one(layers, sum_and_count, SPECS, "train")
    assert {key for n, key in found.inputs.items() if n.users} == {"x"}


@dataclass
class Inner:
    logits: Tensor
    note: str


@dataclass
class Outer:
    inner: Inner
    rest: tuple[Tensor, int]


class Answers(Base):
    kind = "dict"

    def forward(self, x: Tensor) -> Any:
        y = self.lin(x)
        return {
            "dict": {"b": y, "a": [y * 2, None], "x": x, "n": 3},
            "tuple": (y, (x, y)),
            "dataclass": Outer(Inner(y, "as it is"), (y.sum(), 7)),
        }[self.kind]


@pytest.mark.parametrize("kind", ["dict", "tuple", "dataclass"])
def test_predictions_have_the_structure_that_the_model_returns(kind: str) -> None:
    Answers.kind = kind
    variants = Variants(ModelSource(Answers, 0), sum_and_count, lambda rows: SPECS, 2, "fp32")
    captured = variants.anatomy("predict", SPECS).captured
    first = variants.source.materialise(variants.source.params)
    model, x = Answers(), torch.randn(2, 4)
    model.load_state_dict(first, strict=False)
    code = extract(Anatomy(captured), Anatomy(captured).order, [], captured.outputs, [], {})
    arguments = [x, *(first[name] for name, _ in code.leaves)]
    tensors, _ = code.forward(*arguments)
    got = tree_unflatten(tensors, captured.structure)
    wanted = model(x)
    assert repr(tree_map(lambda t: t.tolist() if isinstance(t, Tensor) else t, got)) == repr(
        tree_map(lambda t: t.tolist() if isinstance(t, Tensor) else t, wanted)
    )
    assert type(got) is type(wanted)


def test_a_model_without_a_tensor_is_refused() -> None:
    class Nothing(Base):
        def forward(self, x: Tensor) -> Any:
            return {"a": 1}

    with pytest.raises(CaptureError, match="returns dict without a tensor in it"):
        capture_one(ModelSource(Nothing, 0), sum_and_count, SPECS, "predict")


def test_metrics_are_outputs_of_evaluation_alone() -> None:
    metrics = {
        "right": lambda out, b: ((out.argmax(-1) == b["y"]).sum(), (b["y"] >= 0).sum()),
        "size": lambda out, b: (out.abs().sum(), 2),
    }
    variants = Variants(ModelSource(Base, 0), sum_and_count, lambda rows: SPECS, 2, "fp32", metrics=metrics)
    assert len(variants.primary.captured.outputs) == 1
    batch = {"x": torch.randn(2, 4), "y": torch.tensor([1, -3])}
    first = variants.source.materialise(["lin.weight", "lin.bias"])
    out = nn.functional.linear(batch["x"], *first.values())
    wanted = [out.sum(), (out.argmax(-1) == batch["y"]).sum(), 1, out.abs().sum(), 2]
    cuts = variants.graph.groups[1:2]
    code = variants.code("eval", SPECS, (), 0)
    got, _ = code.forward(*(batch[k] for k in code.inputs), *(first[n] for n, _ in code.leaves))
    assert [float(t) for t in got] == [float(t) for t in wanted]
    parts = [variants.code("eval", SPECS, cuts, s) for s in range(len(cuts) + 1)]
    assert "y" not in parts[0].inputs or len(parts) == 1, "labels are loaded where the loss is"


def test_a_metric_that_is_no_scalar_is_refused() -> None:
    metrics = {"m": lambda outputs, _: (outputs.sum(1), 1.0)}
    with pytest.raises(CaptureError, match=r"the sum of the metric 'm' has shape \(2,\)"):
        capture_one(ModelSource(Base, 0), sum_and_count, SPECS, "eval", metrics=metrics)


@pytest.mark.slow
def test_too_many_shapes_propose_padding() -> None:
    def of(length: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((2, length, 4), "float32"), "y": TensorSpec((2,), "int64")}

    variants = Variants(ModelSource(Base, 0), sum_and_count, lambda rows: of(8), 2, "fp32", max_shapes=3)
    for length in (8, 5, 6, 5, 8):
        variants.anatomy("train", of(length))
    variants.anatomy("eval", of(7))  # counted by mode
    with pytest.raises(
        CaptureError, match=r"(?s)4 shapes in mode train.*max_shapes = 3.*\[2, 6, 4\].*buckets"
    ):
        variants.anatomy("train", of(7))


@pytest.mark.slow
def test_shapes_that_differ_in_their_rows_alone_count_once() -> None:
    def of(rows: int, length: int = 8) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((rows, length, 4), "float32"), "y": TensorSpec((rows,), "int64")}

    variants = Variants(ModelSource(Base, 0), sum_and_count, of, 4, "fp32", max_shapes=2)
    found = [variants.anatomy("predict", of(rows)) for rows in (4, 3, 1, 4)]
    assert found[0] is found[3]
    assert len({id(a) for a in found}) == 3, "each is captured"
    variants.anatomy("predict", of(2, 5))
    variants.anatomy("predict", of(3, 5))
    with pytest.raises(CaptureError, match=r"3 shapes in mode predict"):
        variants.anatomy("predict", of(4, 6))


def test_a_first_dimension_that_is_not_the_rows_counts() -> None:
    def of(rows: int, length: int = 8) -> dict[str, TensorSpec]:  # sequences one after the other
        return {"x": TensorSpec((rows * length, 4), "float32"), "y": TensorSpec((rows * length,), "int64")}

    variants = Variants(ModelSource(Base, 0), sum_and_count, of, 2, "fp32", max_shapes=1)
    variants.anatomy("predict", of(2))
    with pytest.raises(CaptureError, match=r"2 shapes in mode predict"):
        variants.anatomy("predict", of(2, 7))


# -- what is learned -----------------------------------------------------------------------------------


class Learns(nn.Module):
    """Each layer is named by how the loss depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.learned, self.written = nn.Linear(4, 4), nn.Linear(4, 4)
        self.never, self.detached, self.no_grad = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.dropped, self.counted = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(self.learned(x)) + self.detached(x).detach()
        y[:, :2] += self.written(x)[:, :2]
        self.dropped(y).sum()
        with torch.no_grad():
            z = self.no_grad(x) + y
        return y + z + self.counted(x).argmax(-1, keepdim=True)


@pytest.mark.slow
def test_unused_parameters_are_those_without_a_gradient() -> None:
    variants = Variants(ModelSource(Learns, 0), sum_and_count, lambda rows: SPECS, 2, "fp32")
    model = Learns()
    outputs = model(torch.ones(2, 4))
    outputs.sum().backward()
    wanted = [n for n, p in model.named_parameters() if p.grad is not None]
    assert list(variants.trained) == wanted
    assert {n.split(".")[0] for n in wanted} == {"learned", "written"}
    assert set(variants.unused) == {n for n, p in model.named_parameters() if p.requires_grad} - set(wanted)
