"""`plan --refine RUN`: the plan of a run, made anew from what its stages were measured to take."""

from __future__ import annotations

from pathlib import Path
from statistics import quantiles

from mpipipe.config.dotted import resolve
from mpipipe.errors import MpipipeError, ReportError
from mpipipe.planner.noise import noise
from mpipipe.planner.refine import Refined, refine
from mpipipe.planner.schedules import SCHEDULES, register
from mpipipe.report.plan import steadiness
from mpipipe.report.progress import number
from mpipipe.report.run import RunData, read_run
from mpipipe.report.truth import largest_miss, truth_table, truths
from mpipipe.values import Plan, Timeline


def refine_run(folder: Path) -> tuple[Plan, str]:
    """The new plan, and what to say of it. Raises ReportError where the run has no step to be used."""
    run = read_run(folder)
    measured = run.trace.timelines.get("measured") if run.trace else None
    if run.plan is None or measured is None:
        why = "; ".join(run.notes) or "its timeline.json has no measured step"
        raise ReportError(f"{folder}: cannot be refined: {why}; name a run that has come to its end")
    schedule = run.plan.layout.schedule
    if ":" in schedule and schedule not in SCHEDULES:
        register(schedule, resolve("layout.schedule", schedule))
    try:
        refined = refine(run.plan, measured)
    except MpipipeError as error:
        raise ReportError(f"{folder}: cannot be refined: {error}") from error
    found = truths(run.timelines)
    parts = [f"run {run.name}", "", truth_table(found), largest_miss(found), ""]
    return refined.plan, "\n".join([*parts, *_lines(run, run.plan, refined, measured)])


def _lines(run: RunData, plan: Plan, refined: Refined, measured: Timeline) -> list[str]:
    old, ran, new = (_ms(p.prediction.step_s) for p in (plan, refined.ran, refined.plan))
    took_s, ran_s = measured.makespan_s, refined.ran.prediction.step_s
    off = ran_s / took_s - 1.0
    lines = [
        f"step as it was planned: {old} predicted, {_ms(took_s)} measured{_steps(run)}",
        f"predicted from what was measured: {ran}, {abs(off):.1%} {'above' if off > 0 else 'below'} the "
        "measured step: what is left is in the messages and the runtime",
    ]
    if refined.plan.layout == plan.layout:
        lines.append("no better cut is found: the plan stays as it is")
    else:
        gain = 1.0 - refined.plan.prediction.step_s / ran_s
        moved = [
            f"{a} -> {b}" for a, b in zip(plan.layout.cuts, refined.plan.layout.cuts, strict=True) if a != b
        ]
        more = f" and {len(moved) - 3} more" if len(moved) > 3 else ""
        cuts = f"cuts that move: {', '.join(moved[:3])}{more}" if moved else "the same cuts"
        order = refined.plan.layout.order
        on = f"; on ranks {', '.join(map(str, order))}" if order != plan.layout.order else ""
        lines.append(f"new plan: {new} predicted, {gain:.1%} shorter; {cuts}{on}")
    assert refined.plan.costs is not None
    return [*lines, *steadiness(noise(refined.plan, refined.plan.costs))]


def _steps(run: RunData) -> str:
    """How far the steps of the run differ, the first left out."""
    seconds = [s for line in run.metrics[1:] if isinstance(s := line.get("step_s"), int | float)]
    if len(seconds) < 4:
        return ""
    low, _, high = quantiles(seconds, n=4)
    return f" ({_ms(low)} to {_ms(high)} in the middle half of its steps)"


def _ms(seconds: float) -> str:
    return f"{number(seconds * 1e3)} ms"
