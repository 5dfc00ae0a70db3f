"""Which operators are our own: measured once, the same on every rank, kept by checkpoints."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from tiny import TOKENS, cross_entropy

from mpipipe import Pipeline
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.commands.machines import Here
from mpipipe.config import parse
from mpipipe.errors import ConfigError
from mpipipe.graph.contest import Contest
from mpipipe.ops.native import KERNELS_BITS, kernels
from mpipipe.runtime import op_table
from mpipipe.runtime.op_table import Decision, gains, in_words, winner
from mpipipe.runtime.setting import kernel_set
from mpipipe.state.resume import read_state, to_text

pytestmark = pytest.mark.usefixtures("captured_once")
FORMS = {"flash_attention", "layer_norm", "bias_gelu", "linear_cross_entropy", "gemm"}


def pipeline(comm: Communicator, **how: object) -> Pipeline:
    given = {
        "bits": "fast", "batch": 4, "micro_batches": 2, "cost_cache": False, "gemm": "mkl",
        "say": lambda _: None, **how,
    }  # fmt: skip
    model = tiny.gpt(tied=True, dropout=0.0)
    return Pipeline(model, cross_entropy, TOKENS, comm=comm, **given)  # type: ignore[arg-type]


def test_the_faster_one_wins_and_ours_where_nobody_had_the_time() -> None:
    assert winner([(1.0, 0.9), (1.0, 0.9)]) == kernel_set()
    assert winner([(1.0, 0.98)]) == kernel_set()
    assert winner([(1.0, 0.995)]) == "torch"
    assert winner([(1.0, 0.5), (1.0, 1.6)]) == "torch"  # of all ranks together
    assert winner([]) == kernel_set()


def test_what_is_said_of_it() -> None:
    times = {"norm 8": [(1.0, 0.5), (3.0, 0.5)], "norm 16": [(2.0, 1.0)], "gate 8": [(1.0, 2.0)]}
    table = {"norm 8": "v4", "norm 16": "v4", "gate 8": "torch"}
    found = Decision(table, gains(table, times))
    assert found.gains == {"norm": 3.0}
    assert in_words(found) == "kernels: norm 3.00 times as fast as torch; left to torch: gate"
    assert in_words(Decision(table, {})) == "kernels: norm, as before; left to torch: gate"
    assert in_words(Decision({"gate 8": "torch"}, {})) == "kernels: none; left to torch: gate"
    assert "as rank 1 has no compiled ones" in in_words(Decision({"gate 8": "torch"}, {}, without=1))
    some = Decision(table | {"norm 16": "torch"}, {"norm": 3.0})
    assert in_words(some).startswith("kernels: norm (1 of 2 forms) 3.00 times as fast as torch")


@pytest.mark.slow
def test_the_heaviest_form_comes_first_and_each_has_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is no time left."""
    monkeypatch.setattr("mpipipe.graph.contest.BUDGET_S", 0.0)
    times = Contest(tiny.captured("gpt, no dropout", 2).primary, "fp32").times()
    assert {form.split()[0] for form in times} == FORMS
    assert next(iter(times)).startswith("bias_gelu")  # twice the layers, four times the width
    assert all(0 < s < math.inf for pair in times.values() for s in pair)


@pytest.mark.slow
def test_a_start_keeps_the_table_for_the_next_one_and_for_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where others use the machine, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []

    def start(comm: Communicator) -> Pipeline:
        return pipeline(comm, cost_cache=True, say=said.append)

    monkeypatch.setattr("mpipipe.pipeline.others_here", lambda *_: "others are here")
    (first,) = run_local(1, start)
    monkeypatch.setattr(Contest, "times", lambda _: pytest.fail("it is known"))
    (again,) = run_local(1, start)
    assert first.numerics == again.numerics
    assert "as fast as torch" in first.ops_why or "none" in first.ops_why
    assert again.ops_why.endswith(first.ops_why.partition(";")[2])
    config = parse("model: {layers: 1}\npipeline: {micro_batches: 2}\ntrain: {batch: 4, bits: fast}\n")
    here = Here(config, 1).table(again.variants, again.numerics)
    assert here == first.numerics.op_table


WITHOUT = """
import sys, warnings
for name in ("base", "v3", "v4", "v4_bf16", "sve"):
    sys.modules[f"mpipipe._kernels_{name}"] = None
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import tiny
    from test_op_table import pipeline
    from mpipipe.cluster.local import run_local
def run(comm):
    pipe = pipeline(comm)
    assert set(pipe.numerics.op_table.values()) == {"torch"}, pipe.numerics
    return [pipe.step().loss for _ in range(3)]
(one,), two = run_local(1, run), run_local(2, run)
assert one == two[0] == two[1], (one, two)
print(sum("_kernels" in str(w.message) for w in seen))
"""


@pytest.mark.full
def test_without_the_compiled_kernels_it_runs_after_one_warning() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(tiny.__file__).parent), *sys.path])
    env = {**os.environ, "PYTHONPATH": path}
    found = subprocess.run([sys.executable, "-c", WITHOUT], env=env, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "1\n"), found.stderr


@pytest.mark.slow
def test_every_contested_form_is_timed_both_ways() -> None:
    primary = tiny.captured("gpt, no dropout", 2).primary
    times = Contest(primary, "fp32").times()
    assert {form.split()[0] for form in times} == FORMS
    assert all(ours > 0 and theirs > 0 for theirs, ours in times.values())


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_of_the_bits_of_torch_becomes_a_fast_one_only_on_purpose(tmp_path: Path) -> None:
    def first(comm: Communicator) -> None:
        pipeline(comm, bits="torch").save(tmp_path / "c")

    run_local(1, first)
    with pytest.raises(ConfigError, match="bits: 'torch' in the checkpoint, 'fast' now"):
        run_local(1, lambda comm: pipeline(comm, resume=tmp_path / "c"))
    (pipe,) = run_local(1, lambda comm: pipeline(comm, resume=tmp_path / "c", new_numerics=True))
    assert pipe.numerics.bits == "fast"
    assert pipe.numerics.op_table


@pytest.mark.slow
@pytest.mark.skipif(kernels is None, reason="no compiled kernels")
def test_a_run_keeps_which_bits_its_kernels_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def resumed(bits: str, **how: object) -> str:
        def start(comm: Communicator) -> Pipeline:
            return pipeline(comm, bits=bits, resume=tmp_path / bits, say=said.append, **how)

        return run_local(1, start)[0].numerics.kernels

    monkeypatch.setattr(Contest, "times", lambda _: {})
    for bits in ("torch", "fast"):
        run_local(1, lambda comm, b=bits: pipeline(comm, bits=b).save(tmp_path / b))
    assert (resumed("torch"), resumed("fast")) == ("", KERNELS_BITS)
    monkeypatch.setattr("mpipipe.runtime.setting.KERNELS_BITS", "newer")
    assert resumed("torch") == ""
    with pytest.raises(ConfigError, match=f"kernels: '{KERNELS_BITS}' in the checkpoint, 'newer' now"):
        resumed("fast")
    assert resumed("fast", new_numerics=True) == "newer"
    assert not any("older than the record" in line for line in said)
    known = read_state(tmp_path / "fast")
    older = replace(known, numerics=replace(known.numerics, kernels=""))
    (tmp_path / "fast" / "run.json").write_text(to_text(older))
    assert resumed("fast") == "newer"
    assert any("note: the checkpoint is older than the record" in line for line in said)
