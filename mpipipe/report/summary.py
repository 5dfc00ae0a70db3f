"""The end of a run on one screen: predicted next to measured."""

from __future__ import annotations

import numpy as np

from mpipipe.planner.sizes import numbered
from mpipipe.report.progress import MIB, number
from mpipipe.report.table import text_table
from mpipipe.values import Float64, RankReport, Report

_MOST_RANKS = 24  # in a table with a row for each
_COLUMNS: dict[str, list[int]] = {  # of `_numbers`: one, or predicted and measured
    "groups": [0], "parameters, M": [1], "compute, ms": [2, 3], "idle, %": [4, 5], "exposed, ms": [6],
    "sent, MiB": [7], "memory, MiB": [8, 9],
}  # fmt: skip
Head = tuple[str, str]  # rank, its stages


def summary(report: Report, width: int = 110, colour: bool = False) -> str:
    """Text of at most `width` columns, if the figures leave as much; with terminal colours only if
    `colour`."""
    step = text_table(
        ("one step", "predicted", "measured", "measured / predicted"),
        [
            ("time, ms", *_pair(report.predicted_step_s * 1e3, report.step_s * 1e3)),
            ("idle share (bubble)", *_pair(report.predicted_bubble, report.bubble)),
        ],
        width,
        gap=2,
        colour=colour,
    )
    by_rank = text_table(("rank", "stage", *_COLUMNS), _rank_rows(report), width, gap=2, colour=colour)
    parts = [step, "", "by rank, predicted | measured", by_rank, "", *_lines(report)]
    return "\n".join(parts) + "\n"


def _rank_rows(r: Report) -> list[tuple[str, ...]]:
    """One per rank; of many ranks the least, the median and the most, the slowest and the fullest rank."""
    memory = zip(r.predicted_peak_bytes, r.peak_bytes, strict=True)
    numbers = np.array([_numbers(rank, *peaks) for rank, peaks in zip(r.ranks, memory, strict=True)])
    heads = [(str(i), ", ".join(map(str, rank.stages))) for i, rank in enumerate(r.ranks)]
    if len(heads) > _MOST_RANKS:
        heads, numbers = _folded(heads, numbers)
    cells = [_cells(numbers[:, columns], name) for name, columns in _COLUMNS.items()]
    return [(*head, *row) for head, *row in zip(heads, *cells, strict=True)]


def _cells(numbers: Float64, name: str) -> list[str]:
    """One column of the table: a number, or "predicted | measured" with the bars below each other."""
    form = "{:.1f}".format if name == "idle, %" else number
    first, *second = ([form(x) for x in column] for column in numbers.T)
    if not second:
        return first
    wide = max(map(len, second[0]))
    return [f"{predicted} | {measured:>{wide}}" for predicted, measured in zip(first, second[0], strict=True)]


def _numbers(rank: RankReport, predicted_bytes: int, measured_bytes: int) -> tuple[float, ...]:
    return (
        rank.groups, rank.parameters / 1e6, rank.predicted_compute_s * 1e3, rank.compute_s * 1e3,
        100 * rank.predicted_bubble, 100 * rank.bubble, rank.exposed_s * 1e3, rank.sent_bytes / MIB,
        predicted_bytes / MIB, measured_bytes / MIB,
    )  # fmt: skip


def _folded(heads: list[Head], numbers: Float64) -> tuple[list[Head], Float64]:
    """The rows of many ranks: of each number, and the ranks that compute and that hold most."""
    slowest, fullest = (
        int(numbers[:, _COLUMNS[name][1]].argmax()) for name in ("compute, ms", "memory, MiB")
    )
    rows = [numbers.min(axis=0), np.median(numbers, axis=0), numbers.max(axis=0)]
    return [
        ("least", ""), ("median", ""), ("most", ""),
        (f"slowest: {slowest}", heads[slowest][1]), (f"fullest: {fullest}", heads[fullest][1]),
    ], np.array([*rows, numbers[slowest], numbers[fullest]])  # fmt: skip


def _lines(r: Report) -> list[str]:
    speed = f"{number(r.per_s)} {r.unit}/s in the mean"
    lines = [f"{r.steps} steps, final training loss {number(r.final_loss)}, {speed}"]
    lines[0] += stopped(r)
    if r.val_loss is not None:
        lines.append(f"validation loss {number(r.val_loss)}")
        if r.unigram_entropy:
            share = r.val_loss / r.unigram_entropy
            lines[-1] += f" = {share:.3f} of the unigram entropy {number(r.unigram_entropy)}"
    lines += [f"validation {name} {number(value)}" for name, value in r.metrics.items()]
    if r.spares:
        lines.append(f"spare, to the end: {numbered('rank', r.spares)}")
    if r.untimed:
        lines.append(
            "no step was timed since the run went on here: of those before their time is known, the rest is "
            "as predicted"
        )
    if not r.exact_resume:
        lines.append("a resume of this run is not exact: its data is a plain iterable, read from the start")
    lines += filter(None, (r.products, r.kernels, r.blocks))
    return [*lines, f"plan {r.plan_hash}", f"weights {r.weights_sha256}"]


def stopped(r: Report) -> str:
    """Behind the number of steps: why they are not all."""
    if r.stopped_by is None:
        return ""
    if r.stopped_by.startswith("SIG"):
        return f", asked to stop ({r.stopped_by})"
    return f", stopped by {r.stopped_by}"


def _pair(predicted: float, measured: float) -> tuple[str, str, str]:
    return number(predicted), number(measured), f"{measured / predicted:.2f}" if predicted else "-"
