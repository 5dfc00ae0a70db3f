"""Integers that have no entry are said with their sample, and the run ends with that line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from mpipipe import OptimizerSettings, Pipeline
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.errors import DataError

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


@pytest.mark.slow
def test_an_error_of_other_origin_stays_as_it_is() -> None:
    class Refuses(Samples):
        def __getitem__(self, i: int) -> dict[str, Tensor]:
            if i == WRONG:
                raise IndexError("index out of range in self")
            return super().__getitem__(i)

    with pytest.raises(IndexError, match="out of range in self"):
        said(Refuses("ids", 0), "torch")
