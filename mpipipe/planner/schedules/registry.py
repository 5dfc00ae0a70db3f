"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from inspect import unwrap
from traceback import extract_tb

from mpipipe.errors import PlanError, did_you_mean, nearest
from mpipipe.planner.schedules.interleaved import STAGES_PER_RANK, interleaved
from mpipipe.planner.schedules.orders import Build
from mpipipe.planner.schedules.plain import gpipe, one_f_one_b
from mpipipe.planner.schedules.planned import interleaved_planned_even, v_planned_even, zb_planned_even
from mpipipe.planner.schedules.text import from_lines, from_text
from mpipipe.planner.schedules.v_shape import v_half, zb_v
from mpipipe.planner.schedules.zero_bubble import zb_h1, zb_h2
from mpipipe.planner.sizes import counted
from mpipipe.values import Schedule

# Their order follows from costs: a plan has it as `Layout.actions`. Each is no longer than the one by hand,
# until it is made leaner.
BY_HAND = {"zb-planned": "zb-h1", "v-planned": "zb-v", "interleaved-planned": "interleaved"}
PLANNED = tuple(BY_HAND)
SCHEDULES: dict[str, Build] = {
    "1f1b": one_f_one_b, "gpipe": gpipe, "interleaved": interleaved, "zb-h1": zb_h1, "zb-h2": zb_h2,
    "zb-planned": zb_planned_even, "zb-v": zb_v, "v-half": v_half, "v-planned": v_planned_even,
    "interleaved-planned": interleaved_planned_even,
}  # fmt: skip
BUILT_IN = tuple(SCHEDULES)

FILLED = ("zb-v", "v-half")  # action by action: of many they take seconds
PLAIN = ("1f1b", "gpipe")  # with one stage per rank and whole backwards
_TWO_STAGES = ("interleaved", "zb-v", "v-half", "v-planned", "interleaved-planned")
_stages_of_text: dict[str, tuple[int, int]] = {}  # of those from a file: stages and ranks
_own_per_rank: dict[str, int] = {}  # stages, of those of one's own


def check_name(name: str) -> None:
    """Raises PlanError for a name that no schedule has."""
    if name not in SCHEDULES:
        hint = did_you_mean(nearest(name, SCHEDULES))
        raise PlanError(f"schedule {name!r} is not known; choose one of {', '.join(SCHEDULES)}{hint}")


def is_of_file(name: str) -> bool:
    """It is of its own numbers of stages, ranks and micro-batches alone."""
    return name in _stages_of_text


def stages_on(name: str, n_ranks: int) -> int:
    """How many stages it has on so many ranks, where nobody says: two on each for those of ours that have
    several, as many as one's own says, those of a file as they are in it."""
    n_stages, ranks = _stages_of_text.get(name, (0, 0))
    if n_stages and ranks == n_ranks:
        return n_stages
    return (STAGES_PER_RANK if name in _TWO_STAGES else _own_per_rank.get(name, 1)) * n_ranks


@lru_cache(maxsize=32)  # a search asks for the same one again and again
def _built(make: Build, *numbers: int) -> Schedule:
    return make(*numbers)


def build(name: str, n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
    """A schedule by its name; n_ranks: None = as many as it has by itself. Raises PlanError for one that is
    not known, or not for these numbers."""
    check_name(name)
    if n_ranks is None or (n_ranks == n_stages == stages_on(name, n_ranks) and name not in BUILT_IN):
        return _built(SCHEDULES[name], n_stages, n_micro)  # those of others may know no third number
    return _built(SCHEDULES[name], n_stages, n_micro, n_ranks)


def register(
    name: str, order: Callable[[int, int], Sequence[str]], stages_per_rank: int | None = None
) -> None:
    """Makes a schedule of one's own known to the planner, on every rank.

    order(n_stages, n_micro) -> one line per rank, such as "F0 F1 B0 B1": F and B of each micro-batch once,
    or F, I and W, the backwards in ascending order. Where a rank has several stages, "2F0" is of stage 2.
    stages_per_rank: for how many the planner asks; None = what the function's attribute `stages_per_rank`
    says, which also counts where a config names it, or one. What cannot run is refused when a plan is made
    (PlanError, DeadlockError). Raises PlanError where `stages_per_rank` is no number of stages.
    """
    per_rank = getattr(order, "stages_per_rank", 1) if stages_per_rank is None else stages_per_rank
    if type(per_rank) is not int or per_rank < 1:
        raise PlanError(f"schedule {name!r}: stages_per_rank = {per_rank!r}; give an integer >= 1")

    def made(n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
        try:
            given = order(n_stages, n_micro)
            lines = list(given) if isinstance(given, Iterable) else []
        except Exception as error:  # for numbers that it does not know, say; others may do
            raise PlanError(
                f"schedule {name!r} of {n_stages} stages and {n_micro} micro-batches: {error!r}"
                f"{_line_of(order, error)}"
            ) from error
        if isinstance(given, str) or not lines or not all(isinstance(line, str) for line in lines):
            found = repr(given)
            raise PlanError(
                f"schedule {name!r} gives {found if len(found) < 40 else f'{found[:40]}...'}; give a list of "
                'strings, one per rank, such as "F0 F1 B0 B1"'
            )
        if len(lines) != (n_ranks or max(1, n_stages // per_rank)):
            raise PlanError(
                f"schedule {name!r} gives {len(lines)} lines for {n_stages} stages"
                + (f" on {n_ranks} ranks; one line per rank" if n_ranks else f"; {each}")
            )
        return from_lines(name, lines, n_stages, n_micro)

    each = "one line each" if per_rank == 1 else f"one line for each {per_rank}"
    _add(name, made)
    _own_per_rank[name] = per_rank


def _line_of(order: Callable[..., object], error: Exception) -> str:
    """In brackets, of the file of `order` where the error comes by it."""
    frames = extract_tb(error.__traceback__)[1:]  # the first is ours
    code = getattr(unwrap(order), "__code__", None)
    own = [f for f in frames if code and f.filename == code.co_filename] or frames
    return f' (File "{own[-1].filename}", line {own[-1].lineno})' if own else ""


def register_text(name: str, text: str) -> None:
    """As `register`, for the lines of a file (`from_text`): an order of so many stages, ranks and
    micro-batches alone. Raises what `from_text` does."""
    schedule = from_text(text, name)

    def made(n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
        ranks, here, micro = counted(len(schedule.codes), "rank"), n_ranks or n_stages, schedule.n_micro
        if (len(schedule.codes), micro) != (here, n_micro):
            raise PlanError(
                f"{name}: is written for {ranks} and {micro} micro-batch{'es' * (micro != 1)}, and a replica "
                f"has {counted(here, 'rank')} and {n_micro} here; start {ranks} with "
                f"pipeline.micro_batches={micro} (of two replicas twice as many of both), or write an order "
                f"for {here} and {n_micro}"
            )
        if n_stages != schedule.n_stages:
            raise PlanError(
                f"{name}: is of {counted(schedule.n_stages, 'stage')}, here are {n_stages}; cut the model "
                f"into {schedule.n_stages}, or write an order for {n_stages}"
            )
        return schedule

    _add(name, made)
    _stages_of_text[name] = schedule.n_stages, len(schedule.codes)


def _add(name: str, made: Build) -> None:
    if name in BUILT_IN:
        raise PlanError(f"schedule {name!r} is built in; give yours another name")
    SCHEDULES[name] = made
    for known in (_own_per_rank, _stages_of_text):  # of one that had its name before
        known.pop(name, None)
