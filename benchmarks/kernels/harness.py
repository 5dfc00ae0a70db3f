"""One kernel against what torch can do, so that a noisy machine decides nothing.

All sides take turns in one process, every other round backwards, and only seconds of the same round
are divided by each other: a disturbance meets both. The ratio is the median over the rounds.

    round 0   ours  A  B        ratio of A = median of  A_i / ours_i
    round 1   B  A  ours        compared is the best side: the smallest ratio

A whole step has a floor: what stays of it however fast the kernels are. It takes turns like a side, and
torch's seconds over it are the most that the ratio could be. It may have torch as it comes beside it, too,
which does not compete: what is gained over that is what the route of the products gains, times the ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Call = Callable[[], Any]
TURN_S = 0.01  # a turn repeats a short call for that long
WARM_UP = 3  # calls; the first ones allocate, plan and compile
LONG_S = 1.0  # a call that takes longer is warm after two
BUDGET_S, LEAST_ROUNDS = 30.0, 3  # of a case: fewer rounds than asked for, where they would take longer
FLOOR, STOCK = "floor", "torch as it comes"  # among the sides
HOPELESS = 3.0  # a side that takes so many times the best one's warm-up is not measured


@dataclass(frozen=True)
class Case:
    """One computation on given shapes.

    ours, theirs: calls without arguments that compute the same, theirs by name. Each makes its own results
    or writes into the same place every time, so that a repetition is the same work.
    bar: the ratio that is aimed at, None for a case of interest only. bytes, flops: what the computation
    must at least move and compute. prepare: called before anything is, with the threads that are set.
    floor: what stays of the computation with whatever kernels, or one of its `floor_times` equal parts.
    stock: the computation by torch as it comes, where `theirs` have the faster route of the products.
    call: what is looked at is the cost of a call on next to nothing, and bar the most microseconds of one.
    bf16: its products could be made by units for bfloat16.
    """

    kernel: str
    case: str
    ours: Call
    theirs: Mapping[str, Call]
    bar: float | None
    bytes: int = 0
    flops: float = 0.0
    prepare: Call | None = None
    floor: Call | None = None
    floor_times: int = 1
    stock: Call | None = None
    call: bool = False
    bf16: bool = False


@dataclass(frozen=True)
class Skipped:
    """A case that cannot be measured on this machine, and why."""

    kernel: str
    case: str
    bar: float | None
    reason: str


@dataclass(frozen=True)
class Stock:
    """Of torch as it comes: its seconds over ours, over the best of theirs (what the route alone gains),
    and over the floor."""

    ratio: float
    quartiles: tuple[float, float]
    routing: float
    at_most: float | None


@dataclass(frozen=True)
class Compared:
    """Seconds of a call, medians; `ratio` is theirs over ours: above 1, ours is faster. at_most: theirs over
    the floor, None without one."""

    ours_s: float
    best: str
    ratio: float
    quartiles: tuple[float, float]
    ratios: dict[str, float] = field(default_factory=dict)  # of every side that was measured
    unmeasured: dict[str, str] = field(default_factory=dict)  # side -> reason
    rounds: int = 0
    at_most: float | None = None
    stock: Stock | None = None


def compare(case: Case, rounds: int, clock: Callable[[], float] = time.perf_counter) -> Compared:
    """Raises ValueError where no side of `theirs` runs; an error of ours is not caught."""
    if case.prepare:
        case.prepare()
    first_s, unmeasured = {"": _warm_up_s(case.ours, clock)}, dict[str, str]()
    for name, call in case.theirs.items():
        try:
            first_s[name] = _warm_up_s(call, clock)
        except Exception as error:  # whatever torch refuses here
            unmeasured[name] = (str(error).splitlines() or [type(error).__name__])[0]
    if len(first_s) == 1:
        raise ValueError(f"{case.kernel}, {case.case}: none of {list(case.theirs)} runs: {unmeasured}")
    best_s = min(s for name, s in first_s.items() if name)
    slow = [name for name, s in first_s.items() if name and s > HOPELESS * best_s]
    for name in slow:
        unmeasured[name] = f"{first_s.pop(name) / best_s:.1f} times the best one in the warm-up"
    calls = {name: case.theirs[name] if name else case.ours for name in first_s}
    for name, call in ((FLOOR, case.floor), (STOCK, case.stock)):
        if call:
            calls[name], first_s[name] = call, _warm_up_s(call, clock)
    rounds = min(rounds, max(LEAST_ROUNDS, int(BUDGET_S / max(sum(first_s.values()), TURN_S))))
    seconds = _take_turns(calls, first_s, rounds, clock)
    by_round = {name: _ratios(seconds[name], seconds[""]) for name in case.theirs if name in calls}
    ratios = {name: statistics.median(r) for name, r in by_round.items()}
    best = min(ratios, key=lambda name: ratios[name])
    return Compared(
        statistics.median(seconds[""]), best, ratios[best], _quartiles(by_round[best]), ratios, unmeasured,
        rounds, _at_most(case, seconds, best), _stock(case, seconds, best),
    )  # fmt: skip


def _at_most(case: Case, seconds: Mapping[str, list[float]], side: str) -> float | None:
    """Of a side's ratio."""
    return _median(seconds[side], seconds[FLOOR]) / case.floor_times if case.floor else None


def _stock(case: Case, seconds: Mapping[str, list[float]], best: str) -> Stock | None:
    if case.stock is None:
        return None
    ratios, routing = _ratios(seconds[STOCK], seconds[""]), _median(seconds[STOCK], seconds[best])
    return Stock(statistics.median(ratios), _quartiles(ratios), routing, _at_most(case, seconds, STOCK))


def _median(of: list[float], to: list[float]) -> float:
    """Of their ratios."""
    return statistics.median(_ratios(of, to))


def _ratios(of: list[float], to: list[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(of, to, strict=True)]


def _warm_up_s(call: Call, clock: Callable[[], float]) -> float:
    """Seconds of the fastest of the first calls."""
    seconds = [_turn_s(call, 1, clock) for _ in range(2)]
    while len(seconds) < WARM_UP and seconds[-1] <= LONG_S:
        seconds.append(_turn_s(call, 1, clock))
    return min(seconds)


def _take_turns(
    calls: Mapping[str, Call], first_s: Mapping[str, float], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of a call of each side, by round."""
    repeats = {name: max(1, round(TURN_S / max(s, 1e-9))) for name, s in first_s.items()}
    order, seconds = list(calls), {name: list[float]() for name in calls}
    for _ in range(rounds):
        for name in order:
            seconds[name].append(_turn_s(calls[name], repeats[name], clock))
        order.reverse()
    return seconds


def _turn_s(call: Call, repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
