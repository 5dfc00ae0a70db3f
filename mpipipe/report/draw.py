"""Drawings of a `Timeline`, predicted and measured alike.

r0 |0---1---    0=====1=====S|      0--- forward of micro-batch 0, 0=== its backward,
r1 |    0---0=====1---1=====S|      ~~~ input and ::: weight gradient, N norm, S step

Where a rank has several stages, 0' is of its second one, 0'' of its third; a picture has them paler.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mpipipe.report.account import meetings_s
from mpipipe.report.fonts import list_fonts
from mpipipe.report.progress import number
from mpipipe.values import Float64, Instr, Op, Span, Timeline

if TYPE_CHECKING:  # imported by `draw_png` alone: it costs half a second
    from matplotlib.axes import Axes

_FILL = {Op.F: "-", Op.B: "=", Op.I: "~", Op.W: ":", Op.STEP: "S", Op.NORM: "N"}
_COLOUR = {
    Op.F: "#7fb3d5", Op.B: "#f0b27a", Op.I: "#f7dc6f", Op.W: "#a9dfbf",
    Op.STEP: "#c39bd3", Op.NORM: "#d5d8dc",
}  # fmt: skip
_WORD = {
    Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient",
    Op.STEP: "update", Op.NORM: "gradient norm",
}  # fmt: skip
_MOST_LABELS = 2000  # a drawing with more boxes has no room for their numbers
_FOLDED = 16  # ranks shown at either end of a text drawing
_ROWS_INCHES = 20.0  # all rows of a picture together
_SECONDS_FROM_S = 10.0  # a longer drawing is in seconds
_TICK_COLUMNS = 12  # between two marks of the time axis of a text drawing
_SQUEEZED = 0.5  # of the longest drawing: a shorter one beside it would be hard to read


# -- text ------------------------------------------------------------------------------------------


def draw_text(timeline: Timeline, width: int = 100, span_s: float | None = None) -> str:
    """One line per rank of `width` columns at most, time to the right, blank where it waits. Of more than 32
    ranks the first and the last 16.

    span_s: seconds of the whole width, to draw several on one scale; None = the makespan.
    """
    timeline = _norms_met(timeline)
    n = len(timeline.times)
    columns, start = _columns(timeline, width), start_s(timeline)
    scale, turns = columns / (span_s or timeline.makespan_s or 1.0), _turns(timeline)
    lines = [
        f"{_head(timeline, rank)}{_row(timeline.spans(rank), turns, start, scale, columns)}|"
        for rank in _shown(n)
    ]
    if n > len(lines):
        hidden = f"... and ranks {_FOLDED} to {n - _FOLDED - 1} ..."
        lines.insert(_FOLDED, _head(timeline, None) + hidden[:columns].ljust(columns) + "|")
    return "\n".join(lines)


def draw_texts(timelines: Mapping[str, Timeline], width: int = 100) -> str:
    """One under the other, each with its name, and what the signs mean. On one time axis; each on its own,
    as wide as the others, where one would be too narrow to be read."""
    spans_s = [t.makespan_s for t in timelines.values()]
    longest_s, parts = max(spans_s, default=0.0), list[str]()
    apart = min(spans_s, default=0.0) < _SQUEEZED * longest_s
    for i, (name, t) in enumerate(timelines.items(), 1):
        span_s = t.makespan_s if apart else longest_s
        unit, per_s = _unit(span_s)
        parts.append(f"{name}: {number(t.makespan_s * per_s)} {unit}, idle {t.bubble:.1%}")
        parts.append(draw_text(t, width, span_s))
        if apart or i == len(timelines):
            parts.append(" " * len(_head(t, 0)) + _axis(span_s, _columns(t, width)))
    legend = _legend(timelines.values()) + ("; each drawing has a scale of its own" if apart else "")
    return "\n".join([*parts, textwrap.fill(legend, width)])


def _legend(timelines: Collection[Timeline]) -> str:
    ops = _ops(timelines)
    micro = [f"0{_FILL[op] * 3} {_WORD[op]}" for op in ops if op not in (Op.STEP, Op.NORM)]
    whole = [f"{_FILL[op]} {_WORD[op]}" for op in ops if op in (Op.STEP, Op.NORM)]
    several = ["' of a rank's second stage"] if any(max(_turns(t)) for t in timelines) else []
    return ", ".join([*micro, *whole, *several, "blank waiting; the numbers are micro-batches"])


def _axis(span_s: float, columns: int) -> str:
    """Marks at round numbers; each begins in the column of its time."""
    unit, per_s = _unit(span_s)
    row, scale = "", columns / (span_s * per_s or 1.0)
    for tick in _ticks(span_s * per_s, columns // _TICK_COLUMNS):
        label = number(tick) + ("" if row else f" {unit}")
        column = round(tick * scale)
        if column + len(label) <= columns + 1:
            row = row.ljust(column) + label
    return row


def _ticks(end: float, most: int) -> Iterator[float]:
    """Multiples of 1, 2 or 5 times a power of ten from 0 to `end`, about `most` of them."""
    if end <= 0 or most < 1:
        return
    power = 10 ** math.floor(math.log10(end / most))
    step = next(k * power for k in (1, 2, 5, 10) if k * power * most >= end * (1 - 1e-9))
    yield from (i * step for i in range(math.floor(end / step + 1e-9) + 1))


def _columns(timeline: Timeline, width: int) -> int:
    return max(1, width - len(_head(timeline, 0)) - 1)


def _head(timeline: Timeline, rank: int | None) -> str:
    name = "" if rank is None else f"r{rank}"
    return name.ljust(len(f"r{len(timeline.times) - 1}")) + " |"


def _shown(n_ranks: int) -> list[int]:
    ranks = list(range(n_ranks))
    return ranks if n_ranks <= 2 * _FOLDED else ranks[:_FOLDED] + ranks[-_FOLDED:]


def _row(spans: list[Span], turns: Sequence[int], start_s: float, scale: float, columns: int) -> str:
    row = [" "] * columns
    for span in spans:
        fill = _FILL.get(span.instr.op)
        if fill is None:  # a message: what shows is the time that it makes the rank wait
            continue
        # Rounded the same way at both ends, so that boxes which touch in time touch in the picture.
        first, last = (round((t - start_s) * scale) for t in (span.start_s, span.end_s))
        first = min(first, columns - 1)
        room = max(1, min(last, columns) - first)
        wide = (span.end_s - span.start_s) * scale
        label = _label(span.instr, turns)
        if len(label) > min(room, wide + 0.25):  # boxes below one column show what they are, not which
            label = ""
        row[first : first + room] = label + fill * (room - len(label))
    return "".join(row)


# -- picture ---------------------------------------------------------------------------------------


def draw_png(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """One panel per timeline on one time axis, in their order from the top; one row per rank."""
    list_fonts()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = sum(len(t.times) for t in timelines.values())
    row_inches = min(0.4, _ROWS_INCHES / max(rows, 1))
    figure = Figure(figsize=(14, 1.2 * len(timelines) + row_inches * rows), layout="constrained")
    FigureCanvasAgg(figure)
    span_s = max((t.makespan_s for t in timelines.values()), default=0.0)
    unit, per_s = _unit(span_s)
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, timeline) in zip(panels, timelines.items(), strict=True):
        _panel(panel, timeline, row_inches, per_s)
        title = f"{name}: {timeline.makespan_s * per_s:.4g} {unit}, idle {timeline.bubble:.1%}"
        panel.set_title(title, loc="left", fontsize=10)
    panels[-1].set_xlim(0, per_s * span_s or 1.0)
    panels[-1].set_xlabel(f"{unit}; the numbers are micro-batches")
    legend = [Patch(color=_COLOUR[op], label=f"{op.name} {_WORD[op]}") for op in _ops(timelines.values())]
    figure.legend(
        handles=legend, loc="outside upper right", ncols=max(1, len(legend)), fontsize=8, frameon=False
    )
    figure.savefig(path, dpi=120, format="png")


def _panel(axes: Axes, timeline: Timeline, row_inches: float, per_s: float) -> None:
    """per_s: units of the time axis in a second."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb

    timeline = _norms_met(timeline)
    start, ranks = start_s(timeline), range(len(timeline.times))
    turns = np.array([*_turns(timeline), 0])  # the last one: of a NORM, whose stage is -1
    for op, turn in itertools.product(_ops([timeline]), range(max(turns) + 1)):
        boxes = [_boxes(timeline, rank, op, turns == turn, start, per_s) for rank in ranks]
        drawn = PolyCollection(
            list(np.concatenate(boxes)),
            facecolors=[_pale(to_rgb(_COLOUR[op]), turn)],
            edgecolors="black",
            linewidths=min(0.3, row_inches),
        )
        drawn.set_in_layout(False)
        axes.add_collection(drawn)
    if row_inches >= 0.12 and sum(len(t) for t in timeline.times) <= _MOST_LABELS:
        _labels(axes, timeline, start, per_s)
    every = max(1, math.ceil(0.15 / row_inches))  # a name needs so many inches
    axes.set_yticks(ranks[::every], [f"rank {rank}" for rank in ranks[::every]])
    axes.set_ylim(len(ranks) - 0.5, -0.5)


def _boxes(
    timeline: Timeline, rank: int, op: Op, of_stage: NDArray[np.bool_], start: float, per_s: float
) -> Float64:
    """The corners of the boxes of one kind and of some stages, (n, 4, 2), in units of time and rows."""
    codes = timeline.program.codes[rank]
    times = timeline.times[rank][(codes[:, 0] == op) & of_stage[codes[:, 1]]]
    corners = np.empty((len(times), 4, 2))
    corners[:, :, 0] = (times[:, [0, 0, 1, 1]] - start) * per_s
    corners[:, :, 1] = rank + np.array([-0.4, 0.4, 0.4, -0.4])
    return corners


def _pale(colour: tuple[float, float, float], turn: int) -> tuple[float, ...]:
    """Of the later stages of a rank."""
    return tuple(1 - (1 - part) / (1 + turn) for part in colour)


def _labels(axes: Axes, timeline: Timeline, start: float, per_s: float) -> None:
    turns = _turns(timeline)
    for rank in range(len(timeline.times)):
        for span in timeline.spans(rank):
            if span.instr.op in _COLOUR and span.instr.micro >= 0:
                middle = ((span.start_s + span.end_s) / 2 - start) * per_s
                text = axes.text(
                    middle,
                    rank,
                    _label(span.instr, turns),
                    ha="center",
                    va="center",
                    fontsize=6,
                    clip_on=True,
                )
                text.set_in_layout(False)


# -- both ------------------------------------------------------------------------------------------


def _turns(timeline: Timeline) -> list[int]:
    """By stage, how many stages before it are on its rank."""
    ranks = timeline.program.rank_of_stage
    return [ranks[:stage].count(rank) for stage, rank in enumerate(ranks)]


def _label(instr: Instr, turns: Sequence[int]) -> str:
    return f"{instr.micro}{chr(39) * turns[instr.stage]}" if instr.micro >= 0 else ""


def _unit(span_s: float) -> tuple[str, float]:
    """Of a drawing's times, and how many are a second."""
    return ("s", 1.0) if span_s >= _SECONDS_FROM_S else ("ms", 1e3)


def _norms_met(timeline: Timeline) -> Timeline:
    """Each NORM from when the last rank has come to it: before that, a rank waits."""
    times = [t.copy() for t in timeline.times]
    met = meetings_s(timeline) if times else np.zeros(0)
    for own, codes in zip(times, timeline.program.codes, strict=True):
        norms = codes[:, 0] == Op.NORM
        own[norms, 0] = np.minimum(own[norms, 1], np.maximum(own[norms, 0], met))
    return replace(timeline, times=tuple(times))


def _ops(timelines: Iterable[Timeline]) -> list[Op]:
    """Those that are drawn, and occur."""
    found = {int(op) for t in timelines for codes in t.program.codes for op in np.unique(codes[:, 0])}
    return [op for op in _COLOUR if op in found]


def start_s(timeline: Timeline) -> float:
    """Of the first instruction of any rank."""
    return min((float(t[:, 0].min()) for t in timeline.times if len(t)), default=0.0)
