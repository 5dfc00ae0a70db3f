"""A tensor of the batch whose dtype does not fit is named, with the one that does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mpipipe.errors import CaptureError
from mpipipe.graph.capture import capture
from mpipipe.graph.source import ModelSource
from mpipipe.values import TensorSpec


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 10)

    def forward(self, ids: Tensor, scale: Tensor) -> Any:
        return self.head(self.table(ids) + self.head.weight[0] * (scale @ self.head.weight[:8]))


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


RIGHT = {
    "ids": TensorSpec((4,), "int64"), "scale": TensorSpec((4, 8), "float32"),
    "labels": TensorSpec((4,), "int64"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "dtype", "wanted", "line"),
    [
        ("labels", "float32", "int64", "return cross_entropy("),
        ("labels", "float64", "int64", "return cross_entropy("),
        ("labels", "int32", "int64", "in the loss"),
        ("labels", "bool", "int64", "in the loss"),
        ("ids", "float32", "int64", "return self.head("),
        ("scale", "float64", "float32", "return self.head("),
        ("scale", "int64", "float32", "return self.head("),
    ],
)
def test_the_tensor_and_both_dtypes_are_said(key: str, dtype: str, wanted: str, line: str) -> None:
    shape = RIGHT[key].shape
    with pytest.raises(CaptureError) as caught:
        capture(ModelSource(Net, 0), loss, RIGHT | {key: TensorSpec(shape, dtype)}, "train")
    place, said, why = str(caught.value).split("\n  ")
    assert line in place
    assert said == (
        f"{key!r} of the batch is {dtype}{list(shape)}, which cannot be computed with here, {wanted} can: "
        f"let the data give it as torch.{wanted}"
    )
    assert why


@pytest.mark.slow
@pytest.mark.parametrize("key", ["labels", "ids"])
def test_what_torch_takes_is_taken(key: str) -> None:
    """Labels of bytes, shares of classes, and ids of 32 bits."""
    other = {"labels": TensorSpec((4,), "uint8"), "ids": TensorSpec((4,), "int32")}[key]
    capture(ModelSource(Net, 0), loss, RIGHT | {key: other}, "train")
    if key == "labels":
        capture(ModelSource(Net, 0), loss, RIGHT | {key: TensorSpec((4, 10), "float32")}, "train")


@pytest.mark.slow
def test_in_a_list_of_layers_the_layer_is_said() -> None:
    layers = nn.Sequential(nn.Linear(8, 10), nn.ReLU())
    specs = {"input": TensorSpec((4, 8), "float64"), "labels": RIGHT["labels"]}
    with pytest.raises(
        CaptureError, match=r"^in layer 0\n  'input' of the batch is float64.* float32 can: let"
    ):
        capture(ModelSource(layers, 0), loss, specs, "train")


@pytest.mark.slow
def test_a_wrong_dtype_of_the_model_s_own_is_no_fault_of_the_data() -> None:
    class Own(Net):
        def forward(self, ids: Tensor, scale: Tensor) -> Any:
            return super().forward(ids, scale) @ torch.ones(10, 10, dtype=torch.float64)

    with pytest.raises(CaptureError, match="dtype") as caught:
        capture(ModelSource(Own, 0), loss, RIGHT, "train")
    assert "of the batch is" not in str(caught.value)
