"""`plan --cores`: ranks x threads for the cores of a node."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpipipe.cluster.node import cores_available
from mpipipe.commands import cores, plan
from mpipipe.commands.cores import Share, advice, table, ways
from mpipipe.values import Layout, Numerics, Plan, Prediction

MLP = """\
model: {name: mlp, inputs: 16, hidden: [16, 16], classes: 4}
data: {name: synthetic, samples: 64}
train: {batch: 8}
pipeline: {micro_batches: 4}
"""


def share(ranks: int, threads: int, step_s: float) -> Share:
    numerics = Numerics(8, 2, 4, 1, threads, "torch", "mkl", "fp32", "per_use", {}, "", "", 0)
    layout = Layout((), tuple((r,) for r in range(ranks)), "1f1b", 4)
    return Share(ranks, threads, Plan(numerics, layout, Prediction(step_s, 0.1, 0.1, (1 << 20,), 0.0, 0.0)))


def test_every_way_uses_all_cores() -> None:
    assert ways(1) == [(1, 1)]
    assert ways(12) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]


def test_one_rank_with_all_threads_is_named_where_it_is_best() -> None:
    found = [share(1, 4, 1.0), share(2, 2, 1.5), Share(4, 1, None, "too little memory")]
    assert advice(found, "c.yaml", ["train.batch=8", "pipeline.threads=2"]) == (
        "one rank with all 4 threads is best for these cores; 2 ranks x 2 threads takes 50% longer\n"
        "  python -m mpipipe.train c.yaml train.batch=8 pipeline.threads=4"
    )
    rows = [line.split() for line in table(found, 8).splitlines()[1:]]
    assert rows[0] == ["1", "4", "1000", "8", "10.0%", "1", "MiB", "<"]
    assert rows[2] == ["4", "1", "-", "-", "-", "-", "too", "little", "memory"]


def test_several_ranks_are_started_with_their_threads_unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert advice([share(1, 4, 1.01), share(2, 2, 1.0)], "c.yaml", []) == (
        "best: 2 ranks x 2 threads; 1 rank x 4 threads is as good\n"
        "  mpirun --bind-to none -n 2 python -m mpipipe.train c.yaml pipeline.threads=2"
    )
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT", raising=False)
    said = advice([share(2, 2, 1.0)], "c.yaml", [])
    assert "  mpirun --allow-run-as-root --bind-to none -n 2 python" in said


@pytest.mark.usefixtures("made_up_times")
@pytest.mark.slow
def test_each_number_of_threads_is_timed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(MLP)
    asked: list[int] = []
    set_threads, before = cores.Here.__init__.__globals__["set_threads"], torch.get_num_threads()
    monkeypatch.setitem(
        cores.Here.__init__.__globals__, "set_threads", lambda n: (asked.append(n), set_threads(n))
    )
    n = len(cores_available())
    assert plan.main([str(tmp_path / "c.yaml"), "--cores", str(n)]) == 0
    torch.set_num_threads(before)
    out = capsys.readouterr().out
    assert asked == [threads for _, threads in ways(n)]
    assert " <" in out
    assert "python -m mpipipe.train" in out
    assert plan.main([str(tmp_path / "c.yaml"), "--cores", str(n + 1)]) == 1
    assert f"--cores {n + 1}: this process may use {n} core" in capsys.readouterr().err
