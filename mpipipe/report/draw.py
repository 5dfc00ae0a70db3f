"""Drawings of a `Timeline`, predicted and measured alike.

r0 |0---1---    0=====1=====S|      0--- forward of micro-batch 0, 0=== its backward,
r1 |    0---0=====1---1=====S|      ~~~ input and ::: weight gradient, N norm, S step
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpipipe.values import Op, Span, Timeline

if TYPE_CHECKING:  # imported by `draw_png` alone: it costs half a second
    from matplotlib.axes import Axes

_FILL = {Op.F: "-", Op.B: "=", Op.I: "~", Op.W: ":", Op.STEP: "S", Op.NORM: "N"}
_COLOUR = {
    Op.F: "#7fb3d5", Op.B: "#f0b27a", Op.I: "#f7dc6f", Op.W: "#a9dfbf",
    Op.STEP: "#c39bd3", Op.NORM: "#d5d8dc",
}  # fmt: skip
_MOST_LABELS = 2000  # a drawing with more boxes has no room for their numbers


def draw_text(timeline: Timeline, width: int = 100) -> str:
    """One line per rank of `width` columns at most, time to the right, blank where it waits."""
    ranks = range(len(timeline.times))
    heads = [f"r{rank}".ljust(len(f"r{len(ranks) - 1}")) + " |" for rank in ranks]
    columns = max(1, width - len(heads[0]) - 1) if heads else 1
    start, scale = _start(timeline), columns / (timeline.makespan_s or 1.0)
    rows = [_row(timeline.spans(rank), start, scale, columns) for rank in ranks]
    return "\n".join(f"{head}{row}|" for head, row in zip(heads, rows, strict=True))


def _row(spans: list[Span], start_s: float, scale: float, columns: int) -> str:
    row = [" "] * columns
    for span in spans:
        fill = _FILL.get(span.instr.op)
        if fill is None:  # a message: what shows is the time that it makes the rank wait
            continue
        # Rounded the same way at both ends, so that boxes which touch in time touch in the picture.
        first, last = (round((t - start_s) * scale) for t in (span.start_s, span.end_s))
        first = min(first, columns - 1)
        room = max(1, min(last, columns) - first)
        label = str(span.instr.micro) if span.instr.micro >= 0 else ""
        box = (label + fill * room)[:room] if len(label) <= room else fill * room
        row[first : first + room] = box
    return "".join(row)


def draw_png(timelines: dict[str, Timeline], path: str | Path) -> None:
    """One panel per timeline on one time axis, in the dict's order from the top; one row per rank."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = sum(len(t.times) for t in timelines.values())
    figure = Figure(figsize=(14, 1.2 * len(timelines) + 0.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, timeline) in zip(panels, timelines.items(), strict=True):
        _panel(panel, timeline)
        bubble = f"{timeline.bubble:.1%}"
        panel.set_title(f"{name}: {timeline.makespan_s * 1e3:.4g} ms, idle {bubble}", loc="left", fontsize=10)
    panels[-1].set_xlabel("ms")
    legend = [Patch(color=colour, label=op.name) for op, colour in _COLOUR.items()]
    figure.legend(handles=legend, loc="outside upper right", ncols=len(legend), fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def _panel(axes: Axes, timeline: Timeline) -> None:
    start, ranks = _start(timeline), range(len(timeline.times))
    labels = sum(len(t) for t in timeline.times) <= _MOST_LABELS
    for rank in ranks:
        by_op: dict[Op, list[tuple[float, float]]] = {op: [] for op in _COLOUR}
        for span in timeline.spans(rank):
            if span.instr.op in by_op:
                left, long = (span.start_s - start) * 1e3, (span.end_s - span.start_s) * 1e3
                by_op[span.instr.op].append((left, long))
                if labels and span.instr.micro >= 0:
                    middle = left + long / 2
                    axes.text(
                        middle,
                        rank,
                        str(span.instr.micro),
                        ha="center",
                        va="center",
                        fontsize=6,
                        clip_on=True,
                    )
        for op, boxes in by_op.items():
            axes.broken_barh(
                boxes, (rank - 0.4, 0.8), facecolors=_COLOUR[op], edgecolor="black", linewidth=0.3
            )
    axes.set_yticks(list(ranks), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.5)


def _start(timeline: Timeline) -> float:
    return min((float(t[:, 0].min()) for t in timeline.times if len(t)), default=0.0)
