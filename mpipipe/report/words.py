"""A run in words: where the time of a step went, what would buy it back, and the text of `report`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import numpy as np
import yaml

from mpipipe.errors import MpipipeError
from mpipipe.planner.sizes import counted
from mpipipe.report.account import Account, account
from mpipipe.report.draw import draw_texts
from mpipipe.report.plan import decided
from mpipipe.report.progress import number
from mpipipe.report.run import RunData
from mpipipe.report.summary import summary
from mpipipe.report.truth import largest_miss, truth_table, truths
from mpipipe.report.whatif import WhatIf, what_if
from mpipipe.values import Timeline

PARTS = {  # of a step: field of Account -> its name, and what it is
    "compute_s": ("computing", "forward, backward, update"),
    "exposed_s": ("exposed messages", "waiting for a message that is on its way"),
    "bubble_s": ("bubble", "waiting for work that another rank has not done yet"),
    "norm_s": ("gradient norm", "the one collective of a step"),
    "other_s": ("other", "starting sends, and the runtime between instructions"),
}

_OF_FIGURES = 110  # columns that the summary needs; a narrower screen folds its lines, and no figure is lost
_IDLE_OFF = 0.05  # of a step, between the predicted idle share and the measured one: as `_FAR_OFF`
_FAR_OFF = 0.2  # of a prediction, from where on its changes are taken with care


def words(run: RunData, width: int = 110) -> str:
    """The run as text: summary, the step, where its time went, what would buy it back."""
    ran = "; ".join(what_ran(run))
    parts = [f"run {run.name}", *([ran] if ran else []), *(f"note: {note}" for note in run.notes)]
    if run.report is not None:
        parts += ["", summary(run.report, max(width, _OF_FIGURES)).rstrip()]
    else:
        parts += so_far(run)
    if run.timelines:
        parts += ["", draw_texts(run.timelines, width), ""]
        parts += ["where the time went:", *(f"  {line}" for line in where(run.timelines))]
        if found := truths(run.timelines):
            parts += ["", truth_table(found, width), largest_miss(found)]
    saved, told = buys_back(run)
    parts += ["", "what would buy it back:", f"  {told}", *(f"  {saving(w)} [{w.how}]" for w in saved)]
    return "\n".join(_wrapped(line, width) for line in parts) + "\n"


def what_ran(run: RunData) -> Iterator[str]:
    """Model and data, ranks, what was decided, processors: as far as the folder tells."""
    try:
        config = yaml.safe_load(run.config)
        yield f"{config['model']['name']} on {config['data']['name']}"
    except (yaml.YAMLError, KeyError, TypeError):
        pass
    if run.plan is None:
        return
    numerics, layout, costs = run.plan.numerics, run.plan.layout, run.plan.costs
    n = len({rank for on in layout.ranks for rank in on})
    yield f"{counted(n, 'rank')} x {counted(numerics.threads, 'thread')}"
    yield decided(run.plan)
    if costs is not None:
        yield " and ".join(dict.fromkeys(device.kind for device in costs.cluster.devices[:n]))


def where(timelines: dict[str, Timeline]) -> list[str]:
    """Sentences on one step: the measured one where there is one; figures are means over ranks."""
    name = "measured" if "measured" in timelines else next(iter(timelines))
    timeline, accounts = timelines[name], account(timelines[name])
    span_s, n = timeline.makespan_s, len(accounts)
    first = f"{name} step, first to last instruction: {number(span_s * 1e3)} ms on {counted(n, 'rank')}"
    lines = [f"{first}; the mean over ranks is made of" if n > 1 else f"{first}; it is made of"]
    lines += [_part(field, accounts, span_s) for field in PARTS]
    if name == "measured" and "predicted" in timelines:
        lines.append(_against(accounts, span_s, timelines["predicted"]))
    return lines


def _mean_s(accounts: Sequence[Account], field: str) -> float:
    return float(np.mean([getattr(a, field) for a in accounts]))


def _wrapped(line: str, width: int) -> str:
    """A sentence that is too long goes on below; a drawing or a table is as it is."""
    return line if "\n" in line else textwrap.fill(line, width, subsequent_indent="    ") or line


def _part(field: str, accounts: Sequence[Account], span_s: float) -> str:
    (label, meaning), each = PARTS[field], [getattr(a, field) for a in accounts]
    mean = _mean_s(accounts, field)
    text = f"{label}: {number(mean * 1e3)} ms ({_share(mean, span_s)}), {meaning}"
    most, least = int(np.argmax(each)), int(np.argmin(each))
    if max(each) - min(each) > 0.01 * span_s:
        text += (
            f"; {number(each[most] * 1e3)} ms on rank {most}, {number(each[least] * 1e3)} ms on rank {least}"
        )
    return text


def _against(accounts: Sequence[Account], span_s: float, predicted: Timeline) -> str:
    """Measured minus predicted, by part: the differences add up to that of the steps."""
    planned = account(predicted)
    changes = {
        name: (_mean_s(accounts, field) - _mean_s(planned, field)) * 1e3 for field, (name, _) in PARTS.items()
    }
    by_size = sorted(changes.items(), key=lambda change: -abs(change[1]))
    told = ", ".join(f"{name} {change:+.1f} ms" for name, change in by_size if abs(change) >= 0.05)
    ratio = span_s / predicted.makespan_s if predicted.makespan_s else 0.0
    text = f"prediction: {number(predicted.makespan_s * 1e3)} ms, the measured step is {ratio:.2f} of it"
    return f"{text}; {told}" if told else text


def buys_back(run: RunData) -> tuple[tuple[WhatIf, ...], str]:
    """What helps, and how to take it; where nothing does, why."""
    if run.plan is None:
        return (), "there is no plan to simulate"
    try:
        found = what_if(run.plan)
    except MpipipeError as error:
        return (), f"cannot be said: {error}"
    if not found:
        return (), "none of the changes that were simulated makes the step shorter"
    told = "simulations of the plan with its own costs, one change at a time: predictions, no promises"
    ratio = run.report.step_s / run.plan.prediction.step_s if run.report else 1.0
    if abs(ratio - 1.0) > _FAR_OFF:
        told += f"; the measured step is {ratio:.2f} of the predicted one, and why is not in these costs"
    elif run.report and abs(run.report.bubble - run.report.predicted_bubble) > _IDLE_OFF:
        was, said = run.report.bubble, run.report.predicted_bubble
        told += (
            f"; ranks were to be idle for {said:.0%} of a step and were for {was:.0%}, so costs are off: "
            "plan --refine takes those of this run"
        )
    return found, told


def saving(w: WhatIf) -> str:
    return f"{w.change} would save {number(w.saved_s * 1e3)} ms ({w.share:.1%})"


def so_far(run: RunData) -> list[str]:
    """Of a run without a summary: its last step."""
    if not run.metrics:
        return ["no step has been written yet"]
    last = dict(run.metrics[-1])
    step = last.pop("step", "?")
    values = (f"{name} {number(value)}" for name, value in last.items() if isinstance(value, int | float))
    return [f"step {step}: {', '.join(values)}"]


def _share(part_s: float, span_s: float) -> str:
    return f"{part_s / span_s:.1%}" if span_s else "-"
