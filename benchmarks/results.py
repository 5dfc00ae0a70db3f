"""From runs to one JSON line: medians, and every side against ours. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Run = dict[str, Any]  # step_s, peak_bytes, losses and the setting; or failed, a reason
Rounds = Mapping[int, Run]
OURS = "mpipipe"
VARIANTS = {  # of ours, which are no peers: what they are called, and keys beside the example's
    "mpipipe_1f1b": ("schedule: 1f1b", ("pipeline.schedule=1f1b",)),
    "mpipipe_fast": ("bits: fast", ("train.bits=fast",)),
}


def summary(runs: Mapping[str, Rounds]) -> dict[str, Any]:
    """Of one model; `runs` has those of `OURS`, its variants and each peer, by round. The `ratio` of a side
    is its seconds over ours in the same rounds: above 1, ours is faster.
    """
    ours = {i: run for i, run in runs[OURS].items() if "failed" not in run}
    sides = {}
    for name, rounds in runs.items():
        good = {i: run for i, run in rounds.items() if "failed" not in run}
        if not good:
            sides[name] = {"failed": next(iter(rounds.values()))["failed"]}
            continue
        same = [ours[i] for i in good]
        figures = _medians(list(good.values()))
        ratio = figures["step_s"] / statistics.median(run["step_s"] for run in same)
        by_round = [run["step_s"] / ours[i]["step_s"] for i, run in good.items()]
        error = max(_loss_error(run, other) for run, other in zip(good.values(), same, strict=True))
        compared = {"ratio": ratio, "ratio_by_round": by_round, "loss_error": error}
        sides[name] = figures | (compared if name != OURS else {})
    ratios = {name: side["ratio"] for name, side in sides.items() if "ratio" in side and name not in VARIANTS}
    best = min(ratios, key=lambda name: ratios[name], default=None)
    found: dict[str, Any] = {"ratio_to_best_peer": ratios[best] if best else None, "best_peer": best}
    if best:
        peaks = {name: max(sides[name]["peak_bytes"]) for name in (best, OURS)}
        found |= {"peak_bytes_ratio_to_best_peer": peaks[best] / peaks[OURS]}
        found |= {"ratio_by_round": sides[best]["ratio_by_round"]}
    return found | {"sides": sides}


def _medians(runs: Sequence[Run]) -> dict[str, Any]:
    last = runs[-1]
    setting = {k: v for k, v in last.items() if k not in {"step_s", "steps_s", "peak_bytes", "losses"}}
    peaks = [statistics.median(rank) for rank in zip(*(r["peak_bytes"] for r in runs), strict=True)]
    seconds = [r["step_s"] for r in runs]
    return {
        "step_s": statistics.median(seconds),
        "step_s_by_round": seconds,
        "peak_bytes": list(map(int, peaks)),
        "first_loss": last["losses"][0],
        "last_loss": last["losses"][-1],
        **setting,
    }


def _loss_error(run: Run, ours: Run) -> float:
    """The largest relative difference of a step's loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(run["losses"], ours["losses"], strict=True))
