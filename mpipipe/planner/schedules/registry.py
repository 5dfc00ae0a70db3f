"""The schedules by name, and which of them a run can use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpipipe.errors import PlanError
from mpipipe.planner.schedules.interleaved import interleaved
from mpipipe.planner.schedules.orders import Build, stages_of_ranks
from mpipipe.planner.schedules.plain import gpipe, one_f_one_b
from mpipipe.planner.schedules.text import from_lines, from_text
from mpipipe.planner.schedules.v_shape import v_half, zb_v
from mpipipe.planner.schedules.zero_bubble import zb_h1, zb_h2
from mpipipe.values import Op, Program, Schedule

SCHEDULES: dict[str, Build] = {
    "1f1b": one_f_one_b, "gpipe": gpipe, "interleaved": interleaved, "zb-h1": zb_h1, "zb-h2": zb_h2,
    "zb-v": zb_v, "v-half": v_half,
}  # fmt: skip
BUILT_IN = tuple(SCHEDULES)

# What the runtime carries out today, said here alone: the names of the built-in schedules, the preferred one
# first, and the actions and stages per rank of one's own.
RUNNABLE = ("1f1b", "gpipe")
RUNNABLE_KINDS = frozenset({Op.F, Op.B})
RUNNABLE_STAGES = 1


def runnable() -> tuple[str, ...]:
    """The names that a run may be given: `RUNNABLE`, then those of one's own as they were registered."""
    return (*RUNNABLE, *(name for name in SCHEDULES if name not in BUILT_IN))


def check_name(name: str, names: Sequence[str] | None = None) -> None:
    """Raises PlanError for a name that is none of `names`, of all by default."""
    names = tuple(SCHEDULES) if names is None else names
    if name in names:
        return
    what = "cannot be run yet, only planned" if name in SCHEDULES else "is not known"
    raise PlanError(f"schedule {name!r} {what}; choose one of {', '.join(names)}")


def check_runnable(order: Schedule | Program, name: str) -> None:
    """Raises PlanError for an order, of schedule `name`, that the runtime cannot carry out."""
    own = max(map(len, stages_of_ranks(order)))
    if own > RUNNABLE_STAGES:
        raise PlanError(
            f"schedule {name!r} has {own} stages on a rank, which cannot be run yet, only planned; use "
            f"one that has {RUNNABLE_STAGES}, such as {RUNNABLE[0]}"
        )
    kinds = {Op(kind) for codes in order.codes for kind in set(codes[:, 0].tolist())}
    split = kinds & {Op.F, Op.B, Op.I, Op.W} - RUNNABLE_KINDS
    if split:
        found, known = (", ".join(kind.name for kind in sorted(kinds)) for kinds in (split, RUNNABLE_KINDS))
        raise PlanError(
            f"schedule {name!r} has the actions {found}, which cannot be run yet, only planned; use one of "
            f"{known} alone"
        )


def build(name: str, n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
    """A schedule by its name; n_ranks: None = as many as it has by itself. Raises PlanError for one that is
    not known, or not for these numbers."""
    check_name(name)
    if n_ranks is None or (n_ranks == n_stages and name not in BUILT_IN):
        return SCHEDULES[name](n_stages, n_micro)  # what others have registered may know no third number
    return SCHEDULES[name](n_stages, n_micro, n_ranks)


def register(name: str, order: Callable[[int, int], Sequence[str]]) -> None:
    """Makes a schedule of one's own known to the planner, on every rank.

    order(n_stages, n_micro) -> one line per rank, such as "F0 F1 B0 B1": F and B of each micro-batch once,
    or F, I and W, the backwards in ascending order. Where a rank has several stages, "2F0" is of stage 2.
    What cannot run is refused when a plan is made (PlanError, DeadlockError).
    """

    def made(n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
        lines = list(order(n_stages, n_micro))
        if len(lines) != (n_ranks or n_stages):
            raise PlanError(
                f"schedule {name!r} gives {len(lines)} lines for {n_stages} stages"
                + (f" on {n_ranks} ranks; one line per rank" if n_ranks else "; one line each")
            )
        return from_lines(name, lines, n_stages, n_micro)

    _add(name, made)


def register_text(name: str, text: str) -> None:
    """As `register`, for the lines of a file (`from_text`): an order of so many stages, ranks and
    micro-batches alone. Raises what `from_text` does."""
    schedule = from_text(text, name)

    def made(n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
        has = schedule.n_stages, len(schedule.codes), schedule.n_micro
        asked = n_stages, n_ranks or n_stages, n_micro
        if asked != has:
            raise PlanError(
                f"{name}: is of {has[0]} stages on {has[1]} ranks and {has[2]} micro-batches, asked for are "
                f"{asked[0]} on {asked[1]} and {asked[2]}; use its numbers, or write one for yours"
            )
        return schedule

    _add(name, made)


def _add(name: str, made: Build) -> None:
    if name in BUILT_IN:
        raise PlanError(f"schedule {name!r} is built in; give yours another name")
    SCHEDULES[name] = made
