"""Integers that have no entry are said with their sample, and the run ends with that line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import Dataset

from mpipipe import OptimizerSettings, Pipeline
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.errors import DataError
from mpipipe.graph.capture import capture
from mpipipe.graph.program import spec
from mpipipe.graph.source import ModelSource
from mpipipe.runtime.outside import outside

WORDS, CLASSES, WRONG = 50, 10, 37


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Any:
        return self.head(torch.tanh(self.inner(self.table(ids[:, 1:]))))


class Samples(Dataset[dict[str, Tensor]]):
    """Of the numbers of sample `WRONG`, under `key`, the last one is `value`."""

    def __init__(self, key: str, value: int) -> None:
        self.key, self.value = key, value

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(i)
        found = {
            "ids": torch.randint(0, WORDS, (7,), generator=draw),
            "labels": torch.randint(0, CLASSES, (6,), generator=draw),
        }
        if i == WRONG:
            found[self.key][-1] = self.value
        return found


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    labels = batch["labels"].flatten()
    return cross_entropy(outputs.flatten(0, 1), labels, reduction="sum"), labels.numel()


def said(data: Dataset[Any], bits: str) -> str:
    def body(comm: Communicator) -> str:
        pipe = Pipeline(
            Net, loss, data, OptimizerSettings(), batch=16, micro_batches=4, bits=bits, gemm="mkl",
            cost_cache=False, comm=comm, say=lambda _: None,
        )  # fmt: skip
        with pytest.raises(DataError) as caught:
            pipe.fit(4)
        return str(caught.value)

    return str(run_local(1, body)[0])


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["torch", "fast"])
def test_labels_and_words(bits: str) -> None:
    found = said(Samples("labels", 300), bits)
    assert found.startswith("train step ")
    assert "the input 'labels' holds 300 in sample " in found
    assert (
        f"of the batch, data[{WRONG}], but the loss has 10 entries: it must be in [0, 10), or -100 to"
        in found
    )
    found = said(Samples("ids", -1), bits)
    assert "the input 'ids' holds -1 in sample " in found
    assert f"data[{WRONG}], but the table 'table.weight' has 50 entries: it must be in [0, 50); mend" in found


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, CLASSES)

    def forward(self, ids: Tensor) -> Any:
        return self.bag(ids)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(WORDS, CLASSES))

    def forward(self, ids: Tensor) -> Any:
        return self.rows[ids].sum(1)


def picked(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return -outputs.log_softmax(-1).gather(-1, batch["labels"][:, None]).sum(), len(outputs)


def shifted(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    labels = pad(batch["labels"], (0, 1), value=-100)[1:]
    return cross_entropy(outputs, labels, reduction="sum"), len(outputs)


@pytest.mark.parametrize(
    ("model", "loss", "key", "value", "words"),
    [
        (Bag, picked, "ids", 50, "the table 'bag.weight' has 50 entries: it must be in [0, 50); mend"),
        (Bag, picked, "labels", 10, "has 10 entries: it must be in [0, 10); mend"),
        (Table, picked, "ids", -51, "has 50 entries: it must be in [-50, 50); mend"),
        (Bag, shifted, "labels", -1, "the loss has 10 entries: it must be in [0, 10), or -100 to be ignored"),
        (Table, picked, "ids", -50, ""),
        (Bag, shifted, "labels", -100, ""),
    ],
)
def test_whatever_looks_up(model: Any, loss: Any, key: str, value: int, words: str) -> None:
    batch = {"ids": torch.zeros(4, 3, dtype=torch.int64), "labels": torch.zeros(4, dtype=torch.int64)}
    specs = {k: spec(t) for k, t in batch.items()}
    batch[key][2] = value
    captured = capture(ModelSource(model, 0), loss, specs, "train")
    found = outside(captured, batch, {"ids": 8, "labels": 8}, lambda sample: f"data[{sample + 90}]")
    assert words in found
    if words:
        assert found.startswith(f"the input {key!r} holds {value} in sample 10 of the batch, data[100], but ")
    else:
        assert not found


@pytest.mark.slow
def test_an_error_of_other_origin_stays_as_it_is() -> None:
    class Refuses(Samples):
        def __getitem__(self, i: int) -> dict[str, Tensor]:
            if i == WRONG:
                raise IndexError("index out of range in self")
            return super().__getitem__(i)

    with pytest.raises(IndexError, match="out of range in self"):
        said(Refuses("ids", 0), "torch")
