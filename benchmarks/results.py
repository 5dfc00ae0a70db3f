"""From runs to one JSON line: medians, sides against ours, and ours against what is aimed at. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from benchmarks.bars import at_least, at_most, bars_of
from benchmarks.peers import ALONE, SCHEDULES, SIDES

Run = dict[str, Any]  # step_s, peak_bytes, losses and the setting; or failed, a reason
Rounds = Mapping[int, Run]
OURS = "mpipipe"
VARIANTS = {  # of ours, which are no peers: what they are called, and keys beside the example's
    "mpipipe_1f1b": ("schedule: 1f1b", ("pipeline.schedule=1f1b",)),
    "mpipipe_fast": ("bits: fast", ("train.bits=fast",)),
}
ROWS = {"kernels_off": OURS, "kernels_on": "mpipipe_fast"}  # what is compared with peers; the side of ours
CEILINGS = {  # by the side of ours that would be as fast without bubble and message: `Case.apart`
    OURS: "mpipipe_apart",
    "mpipipe_fast": "mpipipe_fast_apart",
}
GROUPS: dict[str, Collection[str]] = {  # of peers
    "peer": SIDES,
    "pipeline": SCHEDULES,
    "parallel": [side for side in SIDES if side not in ALONE],
    "one_process": ALONE,
}


def summary(runs: Mapping[str, Rounds], model: str = "") -> dict[str, Any]:
    """Of one model; `runs` has those of `OURS`, its variants and each peer, by round. The `ratio` of a side
    is its seconds over ours in the same rounds: above 1, ours is faster.
    """
    good = {name: _good(rounds) for name, rounds in runs.items()}
    sides = dict[str, Any]()
    for name, rounds in runs.items():
        if not good[name]:
            sides[name] = {"failed": next(iter(rounds.values()))["failed"]}
            continue
        sides[name] = _medians([*good[name].values()])
        sides[name] |= _compared(good[name], good[OURS]) if name != OURS else {}
    rows = {row: row_of(row, model, good) for row, side in ROWS.items() if good.get(side)}
    ours = rows["kernels_off"]
    found = {key: ours[key] for key in ("ratio_to_best_peer", "best_peer")}
    if best := ours["best_peer"]:
        peaks = {name: max(sides[name]["peak_bytes"]) for name in (best, OURS)}
        found |= {"peak_bytes_ratio_to_best_peer": peaks[best] / peaks[OURS]}
        found |= {"ratio_by_round": sides[best]["ratio_by_round"]}
    return found | {"rows": rows, "sides": sides}


def _good(rounds: Rounds) -> Rounds:
    return {i: run for i, run in rounds.items() if "failed" not in run}


def _medians(runs: Sequence[Run]) -> dict[str, Any]:
    last = runs[-1]
    setting = {k: v for k, v in last.items() if k not in {"step_s", "steps_s", "peak_bytes", "losses"}}
    seconds = [r["step_s"] for r in runs]
    return {
        "step_s": statistics.median(seconds),
        "step_s_by_round": seconds,
        "peak_bytes": _peaks(runs),
        "first_loss": last["losses"][0],
        "last_loss": last["losses"][-1],
        **setting,
    }


def _peaks(runs: Sequence[Run]) -> list[int]:
    """By rank."""
    return [int(statistics.median(rank)) for rank in zip(*(r["peak_bytes"] for r in runs), strict=True)]


def _compared(rounds: Rounds, ours: Rounds) -> dict[str, Any]:
    error = max(_loss_error(run, ours[i]) for i, run in rounds.items() if i in ours)
    by_round = _ratios(rounds, ours)
    return {"ratio": statistics.median(by_round), "ratio_by_round": by_round, "loss_error": error}


def _ratio(rounds: Rounds, ours: Rounds) -> float:
    return statistics.median(_ratios(rounds, ours))


def _ratios(rounds: Rounds, ours: Rounds) -> list[float]:
    """Of the rounds that both have."""
    return [run["step_s"] / ours[i]["step_s"] for i, run in rounds.items() if i in ours]


def _loss_error(run: Run, ours: Run) -> float:
    """The largest relative difference of the loss of a step that both did."""
    return max(abs(a - b) / abs(b) for a, b in zip(run["losses"], ours["losses"], strict=False))


# -- one row of ours against groups of peers ---------------------------------------------------------


def row_of(row: str, model: str, good: Mapping[str, Rounds]) -> dict[str, Any]:
    """Times, bars and memory of one of `ROWS`. good: runs that did not fail, by side and round."""
    ours, found = good[ROWS[row]], dict[str, Any]()
    for group, names in GROUPS.items():
        ratios = {name: _ratio(good[name], ours) for name in good if name in names and good[name]}
        best = min(ratios, key=lambda name: ratios[name], default=None)
        found |= {f"ratio_to_best_{group}": ratios[best] if best else None, f"best_{group}": best}
    peers = {name: _peaks([*good[name].values()]) for name in good if name in SIDES and good[name]}
    peaks = _peaks([*ours.values()])
    ceiling = good.get(CEILINGS[ROWS[row]])
    if ceiling:
        found["ratio_of_ceiling"] = _ratio(ceiling, ours)
    bars = [_bar(group, found, bar) for group, bar in bars_of(model, row).items()]
    for bar in bars if ceiling else ():
        best = good.get(found[f"best_{bar['group']}"], {})
        bar["ceiling_over_best"] = _ratio(ceiling, best) if ceiling.keys() & best.keys() else None
    return {
        "side": ROWS[row],
        **found,
        "bars": bars,
        "peak_bytes_of_worst_rank": _against(peaks, peers, max),
        "peak_bytes_of_all_ranks": _against(peaks, peers, sum),
    }


def _bar(group: str, found: Mapping[str, Any], bar: float) -> dict[str, Any]:
    ratio = found[f"ratio_to_best_{group}"]
    times = 1.0 / ratio if ratio else None
    return {"group": group, "ours_over_best": times, **at_most(times, bar)}


def _against(
    ours: Sequence[int], peers: Mapping[str, Sequence[int]], of_ranks: Callable[[Sequence[int]], int]
) -> dict[str, Any]:
    """Beside the peer that needs least."""
    needs = {name: of_ranks(peaks) for name, peaks in peers.items()}
    least = min(needs, key=lambda name: needs[name], default=None)
    found = {"ours": of_ranks(ours), "least_of_peers": needs[least] if least else None, "peer": least}
    ratio = needs[least] / of_ranks(ours) if least else None
    return found | {"ratio": ratio, **at_least(ratio, 1.0)}


def said_of_bars(found: Mapping[str, Any]) -> list[str]:
    """One line for each bar, for people."""
    lines = []
    for row, figures in found["rows"].items():
        for bar in figures["bars"]:
            best, times = figures[f"best_{bar['group']}"], bar["ours_over_best"]
            text = f"{row}: bar {bar['bar']:.2f} of the best {bar['group'].replace('_', ' ')}: "
            said = "none ran" if best is None else f"{times:.3f} of {best}, "
            met = {True: "met", False: "MISSED", None: ""}[bar["met"]]
            ceiling = bar.get("ceiling_over_best")
            met += f"; without bubble and message {ceiling:.3f}" if ceiling else ""
            lines.append(text + said + met)
        if memory := figures["peak_bytes_of_worst_rank"]["peer"]:
            times = figures["peak_bytes_of_worst_rank"]["ratio"]
            lines.append(f"{row}: memory of the fullest rank: {memory} needs {times:.3f} times as much")
    return lines
