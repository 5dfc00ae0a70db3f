"""`plan --refine RUN`: the plan of a run, made anew from what its stages were measured to take."""

from __future__ import annotations

from pathlib import Path
from statistics import quantiles

from mpipipe.errors import MpipipeError, ReportError
from mpipipe.own_schedules import make_known
from mpipipe.planner.noise import noise, shorter
from mpipipe.planner.refine import Refined, refine
from mpipipe.report.plan import steadiness
from mpipipe.report.progress import number
from mpipipe.report.run import RunData, read_run
from mpipipe.report.trace import TRACE
from mpipipe.report.truth import largest_miss, truth_table, truths
from mpipipe.values import Plan, Timeline

_MOSTLY = 0.75  # of the draws: by chance, a cut is shorter than its like in half of them


def refine_run(folder: Path) -> tuple[Plan, str]:
    """The new plan, and what to say of it. Raises ReportError where the run has no step to be used."""
    run = read_run(folder)
    measured = run.trace.timelines.get("measured") if run.trace else None
    if run.plan is None or measured is None:
        why = "; ".join(run.notes) or "its timeline.json has no measured step"
        raise ReportError(f"{folder}: cannot be refined: {why}; name a run that has come to its end")
    schedule = run.plan.layout.schedule
    make_known("layout.schedule", schedule, again=False)
    try:
        refined = refine(run.plan, measured)
    except MpipipeError as error:
        raise ReportError(f"{folder}: cannot be refined: {error}") from error
    found, doubt = truths(run.timelines), _doubt(run, run.plan, refined)
    missing = f"its {TRACE} has no predicted step to compare stage by stage"
    table = [truth_table(found), largest_miss(found)] if found else [missing]
    lines = _lines(run, run.plan, refined, measured, doubt)
    return refined.ran if doubt else refined.plan, "\n".join([f"run {run.name}", "", *table, "", *lines])


def _doubt(run: RunData, plan: Plan, refined: Refined) -> str:
    """Why another cut than the run's may be one by chance alone; nothing where it is the same, or is not."""
    new, ran = refined.plan, refined.ran
    if new.layout == plan.layout:
        return ""
    gain_s, middle_s = ran.prediction.step_s - new.prediction.step_s, _middle_s(run)
    if middle_s and gain_s < middle_s[1] - middle_s[0]:
        return f"the steps of the run differ by more, {_ms(middle_s[1] - middle_s[0])} in their middle half"
    assert new.costs is not None
    held = shorter(new, ran, new.costs)
    if held and held[0] < _MOSTLY * held[1]:
        return f"it is shorter in {held[0]} of {held[1]} draws of the costs as they spread"
    return ""


def _lines(run: RunData, plan: Plan, refined: Refined, measured: Timeline, doubt: str) -> list[str]:
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
        copies = refined.plan.layout.copies
        on = "; ".join(", ".join(map(str, order)) for order in copies)
        on = f"; on ranks {on}" if copies != plan.layout.copies else ""
        what = "another plan" if doubt else "new plan"
        lines.append(f"{what}: {new} predicted, {gain:.1%} shorter; {cuts}{on}")
    if doubt:
        lines.append(f"not distinguishable from the old cut: kept; {doubt}")
    best = refined.ran if doubt else refined.plan
    assert best.costs is not None
    return [*lines, *steadiness(noise(best, best.costs))]


def _steps(run: RunData) -> str:
    """How far the steps of the run differ."""
    middle_s = _middle_s(run)
    return f" ({_ms(middle_s[0])} to {_ms(middle_s[1])} in the middle half of its steps)" if middle_s else ""


def _middle_s(run: RunData) -> tuple[float, float] | None:
    """The ends of the middle half of its steps since it was started or resumed, the first left out; None
    where there are too few."""
    first = run.trace.steps[0] if run.trace and run.trace.steps else 1
    lines = (line for line in run.metrics if line.get("step", 0) > first)
    seconds = [s for line in lines if isinstance(s := line.get("step_s"), int | float)]
    if len(seconds) < 4:
        return None
    low, _, high = quantiles(seconds, n=4)
    return low, high


def _ms(seconds: float) -> str:
    return f"{number(seconds * 1e3)} ms"
