"""The end of a run on one screen: predicted next to measured."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from mpipipe.report.progress import number
from mpipipe.values import Report

_MIB = 1024**2


def summary(report: Report, width: int = 100, colour: bool = False) -> str:
    """Text of at most `width` columns; with terminal colours only if `colour`."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=colour, color_system="standard" if colour else None
    )
    for table in (_step_table(report), _rank_table(report)):
        console.print(table)
        console.print()
    for line in _lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return out.getvalue()


def _step_table(r: Report) -> Table:
    table = _table("one step", "predicted", "measured", "measured / predicted")
    table.add_row("time, ms", *_pair(r.predicted_step_s * 1e3, r.step_s * 1e3))
    table.add_row("idle share (bubble)", *_pair(r.predicted_bubble, r.bubble))
    return table


def _rank_table(r: Report) -> Table:
    table = _table("peak memory, MiB", "predicted", "measured", "measured / predicted")
    rows = zip(r.predicted_peak_bytes, r.peak_bytes, strict=True)
    for rank, (predicted, measured) in enumerate(rows):
        table.add_row(f"rank {rank}", *_pair(predicted / _MIB, measured / _MIB))
    return table


def _lines(r: Report) -> list[str]:
    lines = [f"{r.steps} steps, final training loss {number(r.final_loss)}, {number(r.per_s)} {r.unit}/s"]
    if r.stopped_by is not None:
        lines[0] += f", stopped by {r.stopped_by}"
    if r.val_loss is not None:
        lines.append(f"validation loss {number(r.val_loss)}")
        if r.unigram_entropy:
            share = r.val_loss / r.unigram_entropy
            lines[-1] += f" = {share:.3f} of the unigram entropy {number(r.unigram_entropy)}"
    lines += [f"validation {name} {number(value)}" for name, value in r.metrics.items()]
    if not r.exact_resume:
        lines.append("a resume of this run is not exact: its data is a plain iterable, read from the start")
    return [*lines, f"plan {r.plan_hash}", f"weights {r.weights_sha256}"]


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _pair(predicted: float, measured: float) -> tuple[str, str, str]:
    return number(predicted), number(measured), f"{measured / predicted:.2f}" if predicted else "-"
