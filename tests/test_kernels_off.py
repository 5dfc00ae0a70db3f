"""`kernels: off`: a run that calls no compiled kernel, and has the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mpipipe import Pipeline
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.config import parse
from mpipipe.errors import MpipipeError
from mpipipe.ops import dropout, native
from mpipipe.report.summary import summary
from mpipipe.train import train
from mpipipe.values import Report

CONFIG = """
model: {name: gpt, vocab: 32, layers: 2, d_model: 32, heads: 2, context: 16, dropout: 0.2}
data: synthetic
train: {steps: 3, batch: 4, lr: 1e-2, warmup: 0}
eval: {every: 0, batches: 1}
pipeline: {micro_batches: 2, cost_cache: false}
sample: {length: 0}
"""


def trained(folder: Path, kernels: str) -> Report:
    config = parse(CONFIG, overrides=[f"kernels={kernels}", f"run.dir={folder}"])
    (report,) = run_local(1, lambda comm: train(comm, config))
    return report


def raising(key: Any) -> Callable[..., None]:
    def call(*_: Any) -> None:
        raise AssertionError(f"{key} is called")

    return call


@pytest.fixture
def in_use_again() -> Iterator[None]:
    yield
    native.use_kernels(True)


@pytest.mark.skipif(native.kernels is None, reason="no compiled kernels")
@pytest.mark.slow
def test_no_compiled_kernel_is_called(
    monkeypatch: pytest.MonkeyPatch, in_use_again: None, tmp_path: Path
) -> None:
    expected = trained(tmp_path / "on", "on")
    for table, _ in native._TABLES:
        for key, functions in table.items():
            monkeypatch.setitem(table, key, tuple(raising(key) for _ in functions))
    with pytest.raises(AssertionError, match="is called"):
        trained(tmp_path / "broken", "on")
    off = trained(tmp_path / "off", "off")
    assert off.weights_sha256 == expected.weights_sha256
    assert (off.kernels, expected.kernels) == ("kernels: off", "")
    assert "\nkernels: off\n" in summary(off)


@pytest.mark.skipif(native.kernels is None, reason="no compiled kernels")
def test_kernels_come_back(in_use_again: None) -> None:
    x, there = torch.ones(1000), [dict(table) for table, _ in native._TABLES]
    assert any(there)
    masked = dropout(x, 0.5, 1, 2, 3)
    for _ in range(2):  # the second time changes nothing
        native.use_kernels(False)
        assert not any(table for table, _ in native._TABLES)
        assert native.version_in_use() == "none"
        assert torch.equal(dropout(x, 0.5, 1, 2, 3), masked)
    for _ in range(2):
        native.use_kernels(True)
        assert [table for table, _ in native._TABLES] == there
        assert native.version_in_use() == native.KERNELS_VERSION


def test_a_pipeline_has_no_bits_of_kernels_without_them() -> None:
    def made(comm: Communicator) -> Pipeline:
        model = torch.nn.Linear(1, 1)
        return Pipeline(model, lambda out, _: out, [], batch=1, bits="fast", kernels=False, comm=comm)

    with pytest.raises(MpipipeError, match="kernels = False, and bits = 'fast'"):
        run_local(1, made)
