"""The parts of the page that one looks things up in: rank by rank, the plan, the numerics, the config."""

from __future__ import annotations

import json
from dataclasses import asdict

from mpipipe.report.page.html import Html, join, section, table, tag
from mpipipe.report.progress import MIB, number
from mpipipe.report.run import RunData
from mpipipe.values import Plan, Report

_RANK_HEADERS = (
    "rank", "stages", "groups", "parameters", "compute, ms", "bubble", "exposed, ms", "sent, MiB",
    "peak, MiB",
)  # fmt: skip


def ranks(run: RunData) -> Html:
    if run.report is None:
        return Html("")
    told = tag("p", "Measured, and what was predicted in brackets.")
    return section("ranks", "Rank by rank", told, table(_RANK_HEADERS, _rank_rows(run.report), "numbers"))


def details(run: RunData) -> Html:
    report = run.report
    told = (report.products, report.kernels, report.blocks) if report is not None else ()
    parts = [tag("p", line) for line in told if line]
    if run.plan is not None:
        parts += [
            _folded("plan", _plan(run.plan)),
            _folded("numerics: what decides the bits", _numerics(run.plan)),
        ]
    parts.append(_folded("config", tag("pre", run.config)))
    if run.report is not None:
        rows = [("weights", run.report.weights_sha256), ("plan", run.report.plan_hash)]
        parts.append(_folded("hashes", table(("what", "sha256"), rows)))
    return section("details", "What was run", *parts)


def _plan(plan: Plan) -> Html:
    layout, p = plan.layout, plan.prediction
    peak = p.peak_bytes.__getitem__
    starts = ("the first group", *layout.cuts)
    rows = [
        (f"{stage}", ", ".join(map(str, on)), start, f"{max(map(peak, on)) / MIB:.0f}", mode)
        for stage, (on, start, mode) in enumerate(zip(layout.ranks, starts, layout.modes, strict=True))
    ]
    told = (
        f"No cut is faster than {number(p.lower_bound_s * 1e3)} ms, the plan is predicted to be {p.gap:.1%} "
        f"above it. Each rank posts {layout.receive_window} receives ahead."
    )
    return join([tag("p", told), table(("stage", "ranks", "from", "memory, MiB", "recomputed"), rows)])


def _numerics(plan: Plan) -> Html:
    rows = [
        (key, value if isinstance(value, str) else json.dumps(value))
        for key, value in asdict(plan.numerics).items()
    ]
    return table(("what", "value"), rows)


def _folded(title: str, inside: Html) -> Html:
    return tag("details", tag("summary", title), inside)


def _rank_rows(report: Report) -> list[tuple[str, ...]]:
    """One row per rank, under _RANK_HEADERS; what was predicted stands in brackets."""
    rows = zip(report.ranks, report.peak_bytes, report.predicted_peak_bytes, strict=True)
    return [
        (
            f"{rank}",
            ", ".join(map(str, r.stages)),
            f"{r.groups}",
            f"{r.parameters:,}",
            f"{number(r.compute_s * 1e3)} ({number(r.predicted_compute_s * 1e3)})",
            f"{r.bubble:.1%} ({r.predicted_bubble:.1%})",
            number(r.exposed_s * 1e3),
            number(r.sent_bytes / MIB),
            f"{number(peak / MIB)} ({number(predicted / MIB)})",
        )
        for rank, (r, peak, predicted) in enumerate(rows)
    ]
