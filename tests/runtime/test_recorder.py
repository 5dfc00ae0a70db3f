"""Which of the steps is the measured one."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.planner import SCHEDULES, lower
from mpipipe.runtime.interpreter import Outcome
from mpipipe.runtime.recorder import KEPT_STEPS, Recorder
from mpipipe.values import Timeline

PROGRAM = lower(SCHEDULES["1f1b"](2, 1), (), "per_use", 4)
NOTHING = Timeline(  # was planned
    PROGRAM, tuple(np.zeros((len(codes), 2)) for codes in PROGRAM.codes),
    tuple(np.zeros(len(codes), np.int64) for codes in PROGRAM.codes),
)  # fmt: skip


def outcome(start_s: float, seconds: float, held: int) -> Outcome:
    """Instructions of equal length."""
    edges = start_s + np.linspace(0.0, seconds, len(PROGRAM.codes[0]) + 1)
    memory = np.full(len(edges) - 1, held)
    memory[0] += 7
    return Outcome(np.stack([edges[:-1], edges[1:]], axis=1), memory, np.zeros(len(memory)))


def median_of(seconds: list[float]) -> list[Timeline]:
    def body(comm: Communicator) -> Timeline:
        recorder = Recorder(comm, PROGRAM)
        for step, took_s in enumerate(seconds):
            recorder.add(outcome(100.0 * step + 50 + comm.rank, took_s, 1000 * step + comm.rank))
        expected = [1000 * step + comm.rank + 7 for step in range(len(seconds))]
        assert recorder.highest_bytes.tolist() == expected
        return recorder.median()

    return run_local(2, body)


def test_the_median_step_without_the_first() -> None:
    for timeline in median_of([1.0, 9.0, 3.0, 5.0, 4.0, 8.0]):
        assert timeline.makespan_s == 6.0  # rank 1 begins a second later, and takes 5 like rank 0
        assert [float(t[0, 0]) for t in timeline.times] == [0.0, 1.0]
        assert [m.tolist()[:2] for m in timeline.memory_bytes] == [[3007, 3000], [3008, 3001]]
        assert timeline.peak_bytes == (3007, 3008)


def test_a_step_adds_a_few_bytes_to_what_is_kept() -> None:
    def body(comm: Communicator) -> int:
        recorder = Recorder(comm, PROGRAM)
        one = outcome(0.0, 1.0, 1 << 40)
        for _ in range(KEPT_STEPS):
            recorder.add(one)
        tracemalloc.start()
        try:
            for _ in range(4000):
                recorder.add(one)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert run_local(1, body)[0] < 4000 * 12


def test_a_typical_step_has_the_medians_of_each_instruction() -> None:
    """Also of every other step, and of those between."""

    def body(comm: Communicator) -> list[Timeline]:
        recorder = Recorder(comm, PROGRAM)
        assert recorder.counted == 0
        for step, took_s in enumerate([99.0, 1.0, 30.0, 3.0, 10.0, 2.0]):
            recorder.add(outcome(100.0 * step + comm.rank, took_s, 5))
        assert recorder.counted == 5
        return recorder.typical(NOTHING)

    for found in run_local(2, body):
        for timeline, took_s in zip(found, (3.0, 2.0, 20.0), strict=True):
            n = len(PROGRAM.codes[0])
            for rank, times in enumerate(timeline.times):
                np.testing.assert_allclose(times[:, 1] - times[:, 0], took_s / n)
                assert timeline.memory_bytes[rank].tolist()[:2] == [12, 5]


@pytest.mark.parametrize(("planned_s", "first_s"), [(0.0, 0.25), (0.5, 0.5), (9.0, 1.0)])
def test_a_typical_step_does_not_wait_for_its_samples(planned_s: float, first_s: float) -> None:
    """Beyond what was planned, which loading may be part of."""
    n = len(PROGRAM.codes[0])

    def body(comm: Communicator) -> list[Timeline]:
        recorder = Recorder(comm, PROGRAM)
        for step in range(4):
            found = outcome(100.0 * step, float(n), 5)  # a second each
            found.data_s[0] = 0.75
            recorder.add(found)
        return recorder.typical(replace(NOTHING, times=(np.array([[0.0, planned_s]] * n),) * 2))

    for timeline in run_local(2, body)[0]:
        for times in timeline.times:
            np.testing.assert_allclose(times[:, 1] - times[:, 0], [first_s, *[1.0] * (n - 1)])


def test_a_single_step_is_its_own_median() -> None:
    assert [timeline.makespan_s for timeline in median_of([2.0])] == [3.0, 3.0]


def test_only_the_newest_steps_count() -> None:
    assert median_of([50.0] * 70 + [2.0] * KEPT_STEPS)[0].makespan_s == 3.0
