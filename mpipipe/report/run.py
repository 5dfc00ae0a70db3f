"""What a run folder holds, as one value: of a run that has ended, still goes, or broke off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from mpipipe.errors import MpipipeError, ReportError
from mpipipe.planner.prediction import expect_plan
from mpipipe.report.metrics import read_metrics
from mpipipe.report.plan_file import read_plan
from mpipipe.report.trace import TRACE, Trace, read_trace
from mpipipe.values import Plan, Report, Timeline, from_json

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class RunData:
    """What is not there is None or empty; `notes` says what is missing and why."""

    name: str  # of the folder
    config: str  # text of config.yaml
    plan: Plan | None
    report: Report | None
    trace: Trace | None
    metrics: tuple[dict[str, Any], ...]  # one per step; a number that JSON has not is a float here
    notes: tuple[str, ...]

    @cached_property
    def timelines(self) -> dict[str, Timeline]:
        """ "predicted" and "measured"; of a run that has not ended the prediction alone, where its plan holds
        the costs."""
        if self.trace is not None:
            return self.trace.timelines
        if self.plan is None or self.plan.costs is None:
            return {}
        try:
            return {"predicted": expect_plan(self.plan, self.plan.costs)[1]}
        except MpipipeError:  # a schedule of the user's own, which is known inside the run alone
            return {}


def read_run(folder: str | Path) -> RunData:
    """Raises ReportError if `folder` is no run folder. A file in it that cannot be read is left out, with a
    note."""
    path, notes = Path(folder), list[str]()
    try:
        config = (path / "config.yaml").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        next_move = "name one, such as runs/latest"
        if path == Path("runs/latest"):
            next_move = "no run has begun here; start in the folder that has runs/, or name a run folder"
        raise ReportError(
            f"{folder}: is no run folder ({error.strerror}: {error.filename}); {next_move}"
        ) from error
    report = _read(path / "summary.json", lambda p: from_json(Report, p.read_bytes()), notes)
    ended = (path / "summary.json").exists()
    if not ended:
        notes.append("the run has not come to its end (no summary.json): this is what there is so far")
    plan = _read(path / "plan.json", read_plan, notes)
    metrics = _read(path / "metrics.jsonl", lambda p: _metrics(p, notes), notes) or ()
    trace: Trace | None = None
    if report is not None and (last := _last_step(metrics)) > report.steps:
        notes.append(
            f"summary.json: is of the run as it ended after {report.steps} steps, and it has gone on to step "
            f"{last} since; it is left out, and {TRACE} with it"
        )
        report = None
    else:
        trace = _read(path / TRACE, read_trace, notes, expected=ended)
    if report is not None and plan is not None and plan.hash != report.plan_hash:
        notes.append("plan.json: is not the plan that ran, which summary.json names; it is left out")
        plan = None
    return RunData(path.resolve().name, config, plan, report, trace, metrics, tuple(notes))


def _last_step(metrics: Sequence[dict[str, Any]]) -> int:
    steps = (line.get("step") for line in metrics)
    return max((step for step in steps if isinstance(step, int)), default=0)


def _read(
    path: Path, read: Callable[[Path], _Kind], notes: list[str], expected: bool = False
) -> _Kind | None:
    """The file's value; None where it is missing, noted if it was `expected`, or cannot be read, noted."""
    if not path.exists():
        if expected:
            notes.append(
                f"{path.name}: is not there; the run broke off at its end, or an older mpipipe wrote none"
            )
        return None
    try:
        return read(path)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "its start"
        wrong = f"{path.name}: damaged or of another version of mpipipe, at {place}: {first['msg']}"
        notes.append(f"{wrong}; it is left out")
    except (MpipipeError, ValueError, OSError) as error:
        notes.append(f"{path.name}: cannot be read ({error}); it is left out")
    return None


def _metrics(path: Path, notes: list[str]) -> tuple[dict[str, Any], ...]:
    """`Metrics` writes what JSON has no number for as "nan", "inf" and "-inf"."""
    words, lines = ("nan", "inf", "-inf"), read_metrics(path)
    if len(lines) < path.read_bytes().count(b"\n"):
        notes.append(
            f"{path.name}: line {len(lines) + 1} is no JSON object; it is left out, with what follows it"
        )
    return tuple({k: float(v) if v in words else v for k, v in line.items()} for line in lines)
