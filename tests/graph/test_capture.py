"""What the captured graph of a model is called, and which models are refused with which words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import MODELS, SHAPES, capture, captured
from torch import Tensor, nn

from mpipipe.errors import CaptureError, PlanError
from mpipipe.graph.anatomy import Anatomy
from mpipipe.graph.capture import Batch
from mpipipe.graph.capture import capture as capture_one
from mpipipe.graph.cut import Code, weight_code
from mpipipe.graph.profile import pieces
from mpipipe.graph.source import ModelSource
from mpipipe.values import TensorSpec, from_json, to_json


def names(model: str, mode: Any, rows: int) -> list[str]:
    anatomy = captured(model, 2).anatomy(mode, rows)
    return [anatomy.captured.name[n] for n in anatomy.order]


def test_names_are_module_path_operator_and_ordinal() -> None:
    found = names("gpt", "train", 2)
    assert found[:3] == ["wte/embedding.0", "wpe/embedding.0", "/add.0"]
    assert "blocks.1.attn.qkv/linear.0" in found
    assert found[-1] == "loss/cross_entropy_loss.0"
    assert len(set(found)) == len(found)
    op = {n.name: n.op for n in captured("gpt", 2).graph.nodes}
    assert op["wte/embedding.0"] == "aten.embedding.default"
    assert op["drop/dropout.0"] == "aten.dropout.default"  # whatever computes it


@pytest.mark.parametrize("model", SHAPES)
def test_names_do_not_depend_on_batch_size_or_mode(model: str) -> None:
    train = names(model, "train", 2)
    assert names(model, "train", 3) == train
    assert names(model, "train", 5) == train
    rest = {"eval": names(model, "eval", 4), "predict": names(model, "predict", 1)}
    for mode, found in rest.items():
        shared = [n for n in train if n in set(found)]
        assert [n for n in found if n in set(train)] == shared, f"{mode}: another order"
        assert len(shared) == len(found), f"{mode}: names of its own"


@pytest.mark.parametrize("model", MODELS)
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


class WritesWeights(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.lin.weight.detach().mul_(0.5)  # here
        return self.lin(x)


class Constant(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])  # here


class Poisson(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + torch.poisson(x.abs())  # here


REFUSED: dict[type[nn.Module], str] = {
    Branches: "torch.where",
    Loops: "torch.where|compute with tensors",
    Reads: "compute with tensors instead of `.item\\(\\)`",
    Scales: "'seen'.* in place by aten.mul_",
    CountsTwo: "'count'.* in place by aten.add_",
    WritesThroughView: "'seen'.* in place by aten.add_",
    WritesElements: "'seen'.* in place by aten.copy_",
    Assigns: "assigns the buffer 'seen' of Assigns",
    WritesWeights: "'lin.weight'.* in place by aten.mul_",
    Constant: "register it as a buffer",
    Poisson: "aten.poisson.default, which has no reproducible twin",
}


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.__name__)
def test_what_cannot_be_captured_is_refused_with_the_user_s_line(model: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match=REFUSED[model]) as caught:
        capture_one(ModelSource(model, 0), sum_and_count, SPECS, "train")
    source, start = inspect.getsourcelines(model)
    line = start + next(i for i, text in enumerate(source) if "# here" in text)
    assert f'File "{__file__}", line {line}' in str(caught.value)


class Counts(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.lin(x)


def test_a_counter_is_an_update_and_no_operator() -> None:
    found = capture_one(ModelSource(Counts, 0), sum_and_count, SPECS, "train")
    assert [(u.buffer, u.momentum, u.statistic) for u in found.updates] == [("count", None, None)]
    assert [found.name[n] for n in Anatomy(found).operators] == ["lin/linear.0", "loss/sum.0"]


BAD_LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "a mean": (lambda out, _: out.mean(), r"return the summed loss and the weight"),
    "a vector": (lambda out, _: (out.sum(1), 1.0), r"in the loss\n  the loss sum has shape \(2,\)"),
    "an integer": (lambda out, _: ((out > 0).sum(), 1.0), "dtype torch.int64"),
}


@pytest.mark.parametrize("what", BAD_LOSSES)
def test_a_loss_of_another_form_is_refused(what: str) -> None:
    loss, says = BAD_LOSSES[what]
    with pytest.raises(CaptureError, match=says):
        capture_one(ModelSource(Base, 0), loss, SPECS, "train")


def weight_of(loss: Callable[..., Any]) -> Code | float:
    return weight_code(Anatomy(capture_one(ModelSource(Base, 0), loss, SPECS, "train")))


def test_a_weight_that_depends_on_the_outputs_is_refused() -> None:
    with pytest.raises(PlanError, match="depends on the model's outputs"):
        weight_of(lambda out, batch: (out.sum(), (out > 0).sum()))
    with pytest.raises(PlanError, match="depends on the model's outputs"):
        weight_of(lambda out, batch: (out.sum(), out.detach().abs().sum() + batch["y"].numel()))


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
