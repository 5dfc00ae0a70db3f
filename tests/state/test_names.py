"""One comparison of names and shapes, for every kind of checkpoint."""

from __future__ import annotations

import pytest

from mpipipe.errors import CheckpointError
from mpipipe.state.names import LISTED, compare_names
from mpipipe.values import TensorSpec

WANTED = {"a.weight": TensorSpec((3, 2), "float32"), "a.bias": TensorSpec((3,), "float32")}


def test_what_fits_passes() -> None:
    compare_names(dict(reversed(WANTED.items())), WANTED, "here", dtypes=True)
    compare_names({n: TensorSpec(s.shape, "bfloat16") for n, s in WANTED.items()}, WANTED, "here")
    compare_names({}, {}, "here")


def test_all_that_does_not_fit_is_in_one_message() -> None:
    found = {"a.weight": TensorSpec((2, 3), "float32"), "b.weight": TensorSpec((), "int64")}
    with pytest.raises(CheckpointError) as caught:
        compare_names(found, WANTED, "runs/x/checkpoint")
    lines = str(caught.value).split("\n")
    assert lines[:-1] == [
        "runs/x/checkpoint: does not fit the model",
        "  1 missing on disk:", "    a.bias [3]",
        "  1 unknown to the model:", "    b.weight []",
        "  1 of another shape:", "    a.weight: [2, 3] on disk, [3, 2] in the model",
    ]  # fmt: skip
    assert "model's settings" in lines[-1]


def test_types_are_compared_where_bits_matter() -> None:
    found = {**WANTED, "a.bias": TensorSpec((3,), "bfloat16")}
    compare_names(found, WANTED, "here")
    with pytest.raises(CheckpointError, match=r"a\.bias: \[3\] bfloat16 on disk, \[3\] float32 in the model"):
        compare_names(found, WANTED, "here", dtypes=True)


def test_a_long_list_is_cut_and_counted() -> None:
    many = {f"layer.{i}": TensorSpec((1,), "float32") for i in range(LISTED + 5)}
    with pytest.raises(CheckpointError, match=f"{LISTED + 5} missing on disk") as caught:
        compare_names({}, many, "here")
    assert f"layer.{LISTED - 1} [1]\n    and 5 more\n" in str(caught.value)
    assert f"layer.{LISTED} " not in str(caught.value)
