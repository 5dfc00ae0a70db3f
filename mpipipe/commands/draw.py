"""`python -m mpipipe draw PLAN_OR_RUN [-o FILE]`: the step of a plan, or of a run, as text or into a file.

    plan.json     with its costs, as a run and `mpipipe plan -o` write it: one step, predicted from the layout
                  that now stands in it
    run folder    one step, predicted and measured

Runs without MPI and without torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mpipipe.commands import run
from mpipipe.errors import PlanError, ReportError
from mpipipe.own_schedules import make_known
from mpipipe.planner.prediction import expect_plan, sizes_of_messages
from mpipipe.report.draw import draw_png, draw_texts
from mpipipe.report.perfetto import write_perfetto
from mpipipe.report.plan_file import read_plan
from mpipipe.report.trace import TRACE, read_trace
from mpipipe.values import Costs, Int64, Plan, Timeline

NARROWEST = 20  # columns
Timelines = dict[str, Timeline]
Sizes = tuple[Int64, ...]  # bytes of the messages, see `sizes_of_messages`


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    parser = _arguments()
    args = parser.parse_args(argv)
    if args.width < NARROWEST:
        parser.error(f"--width {args.width}: at least {NARROWEST} columns")
    return run(lambda: print(draw(args.source, args.output, args.width)))


def draw(source: Path, output: Path | None, width: int) -> str:
    """The text, or where the file is. Raises ReportError, PlanError, DeadlockError."""
    if output is not None and not output.name.endswith((".png", ".perfetto.json")):
        raise ReportError(
            f"-o {output}: the name must end with .png (a picture) or .perfetto.json (for ui.perfetto.dev)"
        )
    timelines, sizes = _of_run(source) if source.is_dir() else _of_plan(source)
    if output is None:
        return draw_texts(timelines, width)
    try:
        if output.suffix == ".png":
            draw_png(timelines, output)
        else:
            write_perfetto(output, timelines, sizes)
    except OSError as error:
        raise ReportError(
            f"-o {output}: cannot be written ({error.strerror}); name a file of yours"
        ) from error
    return str(output)


def _of_run(folder: Path) -> tuple[Timelines, Sizes | None]:
    if not (folder / TRACE).exists():
        raise ReportError(
            f"{folder}: no {TRACE} in it, which a run writes at its end; name a run that has ended, or the "
            "plan.json of one"
        )
    timelines = read_trace(folder / TRACE).timelines
    try:
        plan, costs = _with_costs(folder / "plan.json")
        return timelines, sizes_of_messages(costs, plan.layout, next(iter(timelines.values())).program)
    except PlanError:  # the steps themselves are there
        return timelines, None


def _of_plan(path: Path) -> tuple[Timelines, Sizes]:
    plan, costs = _with_costs(path)
    make_known("layout.schedule", plan.layout.schedule, again=False)
    # also where it does not fit into memory: that is to be seen
    timeline = expect_plan(plan, costs)[1]
    return {"predicted": timeline}, sizes_of_messages(costs, plan.layout, timeline.program)


def _with_costs(path: Path) -> tuple[Plan, Costs]:
    """Raises PlanError."""
    plan = read_plan(path)
    if plan.costs is None:
        raise PlanError(
            f"{path}: has no costs, so there is nothing to predict from; plan again to have them in it"
        )
    return plan, plan.costs


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m mpipipe draw", description="Draws the step of a plan, or of a run, predicted and measured."
    )
    parser.add_argument(
        "source", metavar="PLAN_OR_RUN", type=Path, help="a plan.json, or the folder of a run"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path,
        help="picture.png, or timeline.perfetto.json for ui.perfetto.dev; without it text is printed",
    )  # fmt: skip
    parser.add_argument("--width", type=int, default=100, help="columns of the text; default: 100")
    return parser
