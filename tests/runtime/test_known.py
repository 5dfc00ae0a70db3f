"""Which costs of earlier runs hold, on ranks whose timings are made up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from tiny import TOKENS, cross_entropy

from mpipipe import Pipeline
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.graph.pieces import Sample
from mpipipe.runtime import costing, known
from mpipipe.runtime.known import Reused, Team, names_of, reuse, setting, slowdown, still_held
from mpipipe.runtime.optimizer import OptimizerSettings
from mpipipe.runtime.setting import numerics_of


def sample(seconds: float) -> Sample:
    return Sample(seconds / 4, seconds / 4, seconds / 2, 0.0, 16, 8, (0,), ())


@dataclass
class Machine:
    """A profiler of groups that take `seconds`; notes what it was asked for."""

    seconds: dict[str, float]
    sampled: list[str] = field(default_factory=list)
    ran: dict[str, int] = field(default_factory=dict)

    def sample(self, piece: Any) -> Sample:
        self.sampled.append(piece.key)
        return sample(self.seconds[piece.key])

    def run(self, piece: Any, times: int) -> float:
        self.ran[piece.key] = times
        return self.seconds[piece.key] if times else float("inf")


def team(comm: Communicator, machine: Machine, kinds: Sequence[str] = (), **params: int) -> Team:
    distinct = {
        key: SimpleNamespace(key=key, workspace_bytes=1, param_bytes=params.get(key, 0))
        for key in machine.seconds
    }
    return Team(comm, machine, distinct, kinds or ["here"] * comm.size, 1.0)  # type: ignore[arg-type]


def alone(machine: Machine, held: dict[str, Sample]) -> Reused:
    return run_local(1, lambda comm: reuse(team(comm, machine), held))[0]


def test_without_earlier_runs_all_is_timed() -> None:
    machine = Machine({"a": 1.0, "b": 2.0})
    assert alone(machine, {}) == ({"a": sample(1.0), "b": sample(2.0)}, 1.0, 2)
    assert machine.ran == {}


def test_what_holds_is_not_timed_again_but_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "CHECK_S", 5.0)  # the heaviest, twice
    machine = Machine({"a": 1.0, "b": 2.0, "c": 0.5})
    found = alone(machine, {"a": sample(1.0), "b": sample(2.0)})
    assert found == ({"a": sample(1.0), "b": sample(2.0), "c": sample(0.5)}, 1.0, 1)
    assert machine.sampled == ["c"]
    assert machine.ran == {"b": 1, "a": 0}  # its buffers are part of the memory


def test_what_cannot_be_timed_says_nothing_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "CHECK_S", 5.0)
    held = {"a": sample(1.0), "b": sample(2.0)}
    assert alone(Machine({"a": 1.0, "b": float("inf")}), held) == (held, 1.0, 0)


def test_samples_stay_as_they_were_taken_and_the_machine_is_slower_by_the_median() -> None:
    held = {"a": sample(10.0), "b": sample(1.0), "c": sample(3.0)}
    for again in ({"a": 10.0, "b": 1.0}, {"a": 13.0, "b": 1.3}, {"a": 8.0, "b": 0.8}, {}):
        assert still_held(held, again) == held
    assert slowdown(held, {"a": 13.0, "b": 1.0}) == 1.3, "by seconds"
    assert slowdown({"a": sample(1.0), "b": sample(1.0)}, {"a": 1.0, "b": 1.9}) == 1.0, "one was disturbed"
    assert slowdown(held, {}) == slowdown({}, {}) == slowdown(held, {"a": 0.0}) == 1.0


def test_one_that_differs_is_dropped_and_all_where_the_machine_does() -> None:
    held = {"a": sample(10.0), "b": sample(1.0), "c": sample(3.0)}
    assert set(still_held(held, {"a": 10.0, "b": 1.5})) == {"a", "c"}
    assert set(still_held(held, {"a": 10.0, "b": 0.6})) == {"a", "c"}
    assert set(still_held(held, {"a": 10.0, "b": 1.3})) == {"a", "b", "c"}, "noise of a short timing"
    assert set(still_held(held, {"a": 13.0, "b": 0.9})) == {"a", "c"}, "1.3 was due"
    assert still_held(held, {"a": 17.0, "b": 1.7}) == still_held(held, {"a": 6.0, "b": 0.6}) == {}
    assert still_held({}, {}) == {}


def test_what_is_nothing_to_a_plan_may_be_off() -> None:
    held = {"a": sample(1.0), "b": sample(0.01)}
    for seconds in (0.0, 0.005, 0.03):
        assert set(still_held(held, {"a": 1.0, "b": seconds})) == {"a", "b"}
    assert set(still_held(held, {"a": 1.0, "b": 0.04})) == {"a"}
    assert set(still_held({"a": sample(1.0), "b": sample(0.04)}, {"a": 1.0, "b": 0.01})) == {"a"}


def test_a_sample_of_a_disturbed_run_does_not_stay() -> None:
    """However light it is, once it is timed; the heaviest are at every start."""
    machine = Machine({"a": 1.0})
    assert alone(machine, {"a": sample(1.6)}) == ({"a": sample(1.0)}, 1.0, 1)
    assert alone(machine, {"a": sample(0.5)}) == ({"a": sample(1.0)}, 1.0, 1)


def test_what_is_timed_anew_on_a_slower_machine_fits_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "CHECK_S", 5.0)  # the heaviest, twice
    found = alone(Machine({"a": 2.5, "b": 1.25}), {"a": sample(2.0)})
    assert found == ({"a": sample(2.0), "b": sample(1.25).times(1 / 1.25)}, 1.25, 1)


@pytest.mark.parametrize(
    ("seconds", "slower", "anew"),
    [([1.3], 1.3, 0), ([1.6, 1.25], 1.25, 0), ([1.6, 1.7], 1.0, 1), ([0.6], 1.0, 1)],
)
def test_a_machine_that_looks_too_slow_is_timed_once_more(
    seconds: list[float], slower: float, anew: int
) -> None:
    """The shorter one counts: what else runs on a machine only adds."""
    times, machine = iter(seconds), Machine({"a": 1.0})
    machine.run = lambda piece, n: next(times)  # type: ignore[method-assign]
    assert alone(machine, {"a": sample(1.0)}) == ({"a": sample(1.0)}, slower, anew)
    assert next(times, None) is None


@pytest.mark.parametrize(("second", "kept"), [(1.1, {"a", "b"}), (1.9, {"a"})])
def test_one_that_looks_disturbed_is_timed_once_more(
    monkeypatch: pytest.MonkeyPatch, second: float, kept: set[str]
) -> None:
    monkeypatch.setattr(known, "CHECK_S", 10.0)
    machine, again = Machine({"a": 1.0, "b": 1.0}), {"a": [1.0], "b": [1.9, second]}
    machine.run = lambda piece, n: again[piece.key].pop(0) if n else 0.0  # type: ignore[method-assign]
    assert alone(machine, {"a": sample(1.0), "b": sample(1.0)})[2] == 2 - len(kept)
    assert machine.sampled == sorted({"a", "b"} - kept)
    assert again == {"a": [], "b": []}


def test_the_ranks_share_the_work_and_what_rank_0_has_counts() -> None:
    machines = [Machine(dict.fromkeys("abcd", 1.0)) for _ in range(2)]

    def body(comm: Communicator) -> Reused:
        held = {"a": sample(1.0)} if comm.rank == 0 else {"b": sample(7.0)}
        return reuse(team(comm, machines[comm.rank]), held)

    first, second = run_local(2, body)
    assert first == second == ({key: sample(1.0) for key in "abcd"}, 1.0, 3)
    assert sorted(machines[0].sampled + machines[1].sampled) == ["b", "c", "d"]
    for machine in machines:  # each has run all of them, whoever timed it
        assert set(machine.sampled) | set(machine.ran) == set("abcd")


@pytest.mark.parametrize(("others", "counts"), [("here", True), ("there", False)])
def test_a_slow_core_makes_no_group_dear(others: str, counts: bool) -> None:
    """Of the ranks with as many cores of one kind the least of what each group took; the proportions are
    those of the one that timed it in parts."""
    speeds = [1.9, 1.0, 1.2]
    seconds = {"a": 3.0, "b": 2.0, "c": 1.0, "d": 0.5}

    def body(comm: Communicator) -> Reused:
        machine = Machine({key: s * speeds[comm.rank] for key, s in seconds.items()})
        return reuse(team(comm, machine, ["here", others, others]), {})

    for found in run_local(3, body):
        assert found.timed == 4
        for i, key in enumerate("abcd"):  # taken in turns, as all work in as much memory
            slow = 1.0 if counts else (1.9, 1.0, 1.0)[i % 3]
            assert found.samples[key].seconds == pytest.approx(slow * seconds[key])
            assert found.samples[key].bwd_weight_s == pytest.approx(slow * seconds[key] / 2)


def test_what_is_run_in_passing_is_short_and_light() -> None:
    def usual(seconds: dict[str, float], **params: int) -> str | None:
        def body(comm: Communicator) -> str | None:
            found = team(comm, Machine(seconds), **params).usual({k: sample(s) for k, s in seconds.items()})
            return found.key if found else None

        return run_local(1, body)[0]

    assert usual({"a": 0.001, "b": 0.009, "c": 1.0}) == "b"
    assert usual({"a": 0.001, "b": 0.009, "c": 1.0}, b=known.LIGHT_BYTES + 1) == "a"
    assert usual({"a": 3.0, "b": 2.0}) == "b"
    assert usual({"a": 0.001}, a=known.LIGHT_BYTES + 1) is None


def test_code_of_the_user_has_no_name_that_lasts() -> None:
    pieces = {"a": SimpleNamespace(lasting=True), "b": SimpleNamespace(lasting=False)}
    assert set(names_of(pieces, "here")) == {"a"}  # type: ignore[arg-type]
    assert names_of(pieces, "here") != names_of(pieces, "there")  # type: ignore[arg-type]


def test_the_largest_weights_are_made_by_one_rank_at_a_time() -> None:
    machines = [Machine(dict.fromkeys("abc", 1.0)) for _ in range(2)]

    def body(comm: Communicator) -> None:
        reuse(team(comm, machines[comm.rank], b=known.LIGHT_BYTES + 1, c=known.LIGHT_BYTES), {})

    run_local(2, body)
    assert sorted(machines[0].sampled + machines[1].sampled) == ["a", "b", "c"]
    for machine in machines:
        assert "b" not in set(machine.ran) - set(machine.sampled)
        assert {"a", "c"} <= set(machine.sampled) | set(machine.ran)


def test_who_has_nothing_of_its_own_keeps_busy_with_the_smallest() -> None:
    machine = Machine(dict.fromkeys("abc", 1.0))

    def body(comm: Communicator) -> None:
        it = team(comm, machine if comm.rank == 0 else Machine({}), a=5, b=3, c=4)
        comm.oversubscribed = False
        if comm.rank == 0:
            it._keep_busy([])
        else:
            while not machine.ran:  # this one is timing meanwhile
                time.sleep(0.001)
            comm.wait(comm.isend(np.zeros(1, np.uint8), 0, 0))
            comm.wait(comm.irecv(np.zeros(1, np.uint8), 0, 0))

    run_local(2, body)
    assert set(machine.ran) == {"b"}


def test_a_changed_fact_changes_the_name() -> None:
    numerics = numerics_of(
        batch=8, micro_batches=2, blocks=1, threads=1, gemm="mkl", precision="fp32", tied="per_use", seed=0
    )

    def name(comm: Communicator, kind: str = "here", chilled_bytes: int = 1 << 20, **changes: Any) -> str:
        return setting(replace(numerics, **changes), kind, comm, False, chilled_bytes)

    def body(comm: Communicator) -> tuple[str, str, set[str]]:
        others = {
            name(comm, "there"),
            name(comm, chilled_bytes=1 << 21),
            name(comm, threads=2),
            name(comm, precision="bf16"),
        }
        return name(comm), name(comm, chilled_bytes=(1 << 20) + 1), others

    ((one, near, others),) = run_local(1, body)
    assert one == near, "every shape has another size"
    assert len(others - {one}) == 4


@pytest.mark.usefixtures("captured_once")
@pytest.mark.slow
def test_an_update_is_known_as_long_as_the_groups_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any learning rate, but not for another optimizer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(known, "still_held", lambda held, again: held)
    monkeypatch.setattr("mpipipe.pipeline.others_here", lambda *_: None)
    timed: list[object] = []
    measured = costing.update_times
    monkeypatch.setattr(costing, "update_times", lambda *given: (timed.append(given[0]), measured(*given))[1])

    def start(comm: Communicator, **how: Any) -> Pipeline:
        model, settings = tiny.gpt(tied=True, dropout=0.0), OptimizerSettings(**how)
        return Pipeline(
            model, cross_entropy, TOKENS, settings, batch=4, micro_batches=2, gemm="mkl", comm=comm,
            say=lambda _: None,
        )  # fmt: skip

    found = [run_local(1, partial(start, lr=lr))[0].costs.step_s_per_byte for lr in (1e-3, 1e-2)]
    assert len(timed) == 1
    assert found[0] == found[1]
    run_local(1, partial(start, kind="sgd"))
    monkeypatch.setattr(known, "still_held", lambda held, again: dict(list(held.items())[1:]))
    run_local(1, start)
    assert len(timed) == 3, "a machine on which one was disturbed"
