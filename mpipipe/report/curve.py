"""What more ranks would bring, as a table, a sentence and a picture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpipipe.planner.curve import Curve, Level, Misfit
from mpipipe.planner.per_node import ALIKE, Split
from mpipipe.planner.sizes import counted, size_text
from mpipipe.report.progress import number
from mpipipe.report.table import text_table

if TYPE_CHECKING:  # imported by `draw_curve` alone: it costs half a second
    from matplotlib.axes import Axes

_WIDTH = 128  # of a table
_KNEE, _LINE = "#c0392b", "#2e86c1"
_ABOVE = 1.0005  # an efficiency that is shown as more than 100 %


def curve_table(curve: Curve, width: int = _WIDTH) -> str:
    """A row for each number of ranks, also where no plan fits; `<` marks the knee. Node-hours are those of
    `Curve.steps`, as `advice` says."""
    heads = ("ranks", "nodes", "samples/s", "efficiency", "bubble", "memory", "node-hours", "")
    rows = {level.ranks: _row(level, level.ranks == curve.knee) for level in curve.levels}
    rows |= {n: (str(n), *["-"] * (len(heads) - 2), why) for n, why in _reasons(curve.misfits)}
    return text_table(
        heads, [rows[n] for n in sorted(rows)], width, (len(heads) - 1,), (len(heads) - 1,), gap=2
    )


def advice(curve: Curve) -> str:
    """How many nodes to ask for, in one sentence."""
    knee = curve.at_knee
    rest = [level for level in curve.levels if level.ranks > knee.ranks]
    text = (
        f"ask for {_nodes(knee)}: {number(knee.samples_per_s)} samples/s at {knee.efficiency:.0%} efficiency "
        f"and {number(knee.node_hours)} node-hours per {_span(curve)}"
    )
    if rest:
        more, faster = rest[0], rest[0].samples_per_s / knee.samples_per_s
        cost = more.node_hours / knee.node_hours
        return (
            f"{text}; {_nodes(more)} would be {faster:.2f} times as fast for {cost:.2f} times the node-hours"
        )
    if why := next((m.why for m in curve.misfits if m.ranks > knee.ranks), curve.end):
        return f"{text}; larger levels could not be planned: {why}"
    return f"{text}; that is the largest level that was planned, and larger ones may be worth it as well"


def splits_table(curves: Mapping[Split, Curve], nodes: Sequence[int], spares: int = 0) -> str:
    """The predicted step for each number of nodes and each way to share out their cores, in ms; `<` marks the
    shortest. At the end the next best. spares: ranks that are in no level."""
    heads = ("nodes", *map(_short, curves), "next best")
    rows = []
    for n in nodes:
        steps = {split: _step_s(curve, n * split.per_node - spares) for split, curve in curves.items()}
        order = sorted((split for split, s in steps.items() if s), key=lambda split: steps[split])
        cells = [
            f"{'< ' * (split in order[:1])}{number(s * 1e3)}" if s else "-" for split, s in steps.items()
        ]
        rows.append((str(n), *cells, _next_best(order, steps)))
    return text_table(heads, rows, _WIDTH, (len(heads) - 1,), (len(heads) - 1,), gap=2)


def _next_best(order: Sequence[Split], steps: Mapping[Split, float]) -> str:
    if len(order) < 2:
        return ""
    best, second = order[:2]
    slower = steps[second] / steps[best] - 1.0
    return f"{_short(second)} {f'takes {slower:.0%} longer' if slower >= ALIKE else 'is as good'}"


def _short(split: Split) -> str:
    return f"{split.per_node} x {split.threads}"


def _step_s(curve: Curve, ranks: int) -> float:
    """0 where there is no plan."""
    return next((level.step_s for level in curve.levels if level.ranks == ranks), 0.0)


def beyond_proportion(curve: Curve) -> list[str]:
    """Why there is an efficiency above 100 %; no line where there is none."""
    first = curve.levels[0]
    if all(level.efficiency < _ABOVE for level in curve.levels):
        return []
    return [
        f"efficiency above 100%: it is relative to {_ranks(first)}, the smallest level that fits, where each "
        "rank gets less done, as memory or whole groups make stages uneven there"
    ]


def draw_curve(curve: Curve, path: str | Path, title: str) -> None:
    """PNG: throughput, efficiency with the bubble, memory and node-hours over the ranks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}: {advice(curve)}", fontsize=9, wrap=True)
    panels = figure.subplots(2, 2, sharex=True)
    ranks = [level.ranks for level in curve.levels]
    speed, share, memory, cost = panels.flat
    speed.plot(ranks, [level.samples_per_s for level in curve.levels], "o-", color=_LINE, label="predicted")
    first = curve.levels[0]
    per_rank = first.samples_per_s / first.ranks
    speed.plot(ranks, [per_rank * n for n in ranks], ":", color="grey", label="in proportion to the ranks")
    share.plot(ranks, [level.efficiency for level in curve.levels], "o-", color=_LINE, label="efficiency")
    share.plot(ranks, [level.bubble for level in curve.levels], "s--", color="#f0b27a", label="bubble")
    memory.plot(ranks, [level.peak_bytes / 2**30 for level in curve.levels], "o-", color=_LINE)
    cost.plot(ranks, [level.node_hours for level in curve.levels], "o-", color=_LINE)
    _finish(speed, curve, "samples/s", legend=True)
    _finish(share, curve, "share", legend=True)
    _finish(memory, curve, "memory of the fullest rank, GiB")
    _finish(cost, curve, f"node-hours per {_span(curve)}")
    speed.set_yscale("log", base=2)
    speed.yaxis.set_major_formatter(lambda y, _: number(y))
    for panel in (share, memory, cost):
        panel.set_ylim(0, 1.05 * panel.dataLim.y1)
    for panel in (memory, cost):
        panel.set_xlabel("ranks; the red line is the knee")
    figure.savefig(path, dpi=120, format="png")


def _finish(axes: Axes, curve: Curve, label: str, legend: bool = False) -> None:
    ticks = list[int]()
    for level in curve.levels:  # each number needs room
        if not ticks or level.ranks >= 1.3 * ticks[-1]:
            ticks.append(level.ranks)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, map(str, ticks))
    axes.axvline(curve.knee, color=_KNEE, linewidth=0.8)
    axes.set_ylabel(label, fontsize=9)
    axes.grid(alpha=0.3)
    if legend:
        axes.legend(fontsize=8, frameon=False)


def _row(level: Level, knee: bool) -> tuple[str, ...]:
    return (
        str(level.ranks), str(level.nodes), number(level.samples_per_s), f"{level.efficiency:.1%}",
        f"{level.bubble:.1%}", size_text(level.peak_bytes), number(level.node_hours),
        "< knee" if knee else "",
    )  # fmt: skip


def _reasons(misfits: Sequence[Misfit]) -> Iterator[tuple[int, str]]:
    """By ranks; one that differs from an earlier one by the number of ranks alone is not told again."""
    told: dict[str, int] = {}
    for misfit in misfits:
        first = told.setdefault(re.sub(rf"\b{misfit.ranks}\b", "N", misfit.why), misfit.ranks)
        yield misfit.ranks, misfit.why if first == misfit.ranks else f"as with {first} ranks"


def _nodes(level: Level) -> str:
    return f"{counted(level.nodes, 'node')} ({_ranks(level)})"


def _ranks(level: Level) -> str:
    return counted(level.ranks, "rank")


def _span(curve: Curve) -> str:
    return "epoch" if curve.epoch else f"{curve.steps:,.0f} steps"
