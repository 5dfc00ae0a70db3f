"""Which operators are our own: measured once, the same on every rank, kept by checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from tiny import TOKENS, cross_entropy

from mpipipe import Pipeline
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.errors import ConfigError
from mpipipe.graph.contest import Contest
from mpipipe.runtime import op_table
from mpipipe.runtime.op_table import winner
from mpipipe.runtime.setting import kernel_set

FORMS = {"flash_attention", "layer_norm", "bias_gelu", "linear_cross_entropy", "embedding"}


def pipeline(comm: Communicator, **how: object) -> Pipeline:
    given = {"bits": "fast", "batch": 4, "micro_batches": 2, "cost_cache": False, "gemm": "mkl", **how}
    model = tiny.gpt(tied=True, dropout=0.0)
    return Pipeline(model, cross_entropy, TOKENS, comm=comm, say=lambda _: None, **given)  # type: ignore[arg-type]


def test_the_faster_one_wins_and_ours_where_nobody_had_the_time() -> None:
    assert winner([(1.0, 0.9), (1.0, 0.9)]) == kernel_set()
    assert winner([(1.0, 0.99)]) == "torch"
    assert winner([(1.0, 0.5), (1.0, 1.6)]) == "torch"  # of all ranks together
    assert winner([]) == kernel_set()


def test_every_contested_form_is_timed_both_ways() -> None:
    primary = tiny.captured("gpt, no dropout", 2).primary
    times = Contest(primary, "fp32").times()
    assert {form.split()[0] for form in times} == FORMS
    assert all(ours > 0 and theirs > 0 for theirs, ours in times.values())


def test_ranks_agree_and_a_checkpoint_keeps_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice_as_fast(self: Contest) -> dict[str, tuple[float, float]]:
        return {m.form: (2.0, 1.0) for m in self.anatomy.matches if m.form.startswith("layer_norm")}

    def never(self: Contest) -> dict[str, tuple[float, float]]:
        raise AssertionError("a resumed run decides nothing")

    def first(comm: Communicator) -> dict[str, str]:
        pipe = pipeline(comm)
        pipe.step()
        pipe.save(tmp_path / "c")
        return pipe.numerics.op_table

    monkeypatch.setattr(Contest, "times", twice_as_fast)
    tables = run_local(2, first)
    assert tables[0] == tables[1]
    assert {form.split()[0] for form in tables[0]} == FORMS
    monkeypatch.setattr(op_table.Contest, "times", never)
    resumed = run_local(1, lambda comm: pipeline(comm, resume=tmp_path / "c").numerics.op_table)
    assert resumed == tables[:1]
    with pytest.raises(ConfigError, match="bits: 'fast' in the checkpoint, 'torch' now"):
        run_local(1, lambda comm: pipeline(comm, bits="torch", resume=tmp_path / "c"))
