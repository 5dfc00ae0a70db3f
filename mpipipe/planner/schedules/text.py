"""Schedules as text: one line per rank, such as `0F0,0F1,,0B0`.

Each cell has the stage, the kind and the micro-batch of an action, as torch.distributed.pipelining writes
them (`_Action`). An empty one is a unit of waiting there; here it says nothing: times follow from the order.
So do messages, and when weights are there: torch's cells of them (`0SEND_F1`, `1UNSHARD`) say nothing. A
forward and a backward that it overlaps (`(0F3;3B1)OVERLAP_F_B`) are two actions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner.schedules.check import check, check_ends
from mpipipe.planner.schedules.orders import by_rank
from mpipipe.values import Action, Op, Schedule

_ACTION = re.compile(r"(\d*)([FBIW])(\d+)")
_MESSAGE = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*")
_OVERLAPPED = re.compile(r"\(([^,;()]+);([^,;()]+)\)OVERLAP_F_B")


def to_text(schedule: Schedule) -> str:
    """One line per rank, with a line break behind each."""
    return "".join(f"{line}\n" for line in to_lines(schedule))


def to_lines(schedule: Schedule) -> tuple[str, ...]:
    """One line per rank."""
    kinds = [op.name for op in Op]
    return tuple(
        ",".join(f"{stage}{kinds[kind]}{micro}" for kind, stage, micro in codes.tolist())
        for codes in schedule.codes
    )


def from_text(text: str, name: str = "the schedule") -> Schedule:
    """Inverse of `to_text`. name: how messages call it.

    Raises PlanError and DeadlockError, showing the place, for what is no action, lacks, comes twice, is on
    two ranks, comes too early, or waits in a circle. What is too large for the memory is seen when it is
    planned.
    """
    lines = text.removeprefix("\ufeff").rstrip().split("\n")  # which spreadsheets put before UTF-8
    words = [_words(line) for line in lines]
    if not any(words):
        raise PlanError(f"{name}: is empty; write one line per rank, such as 0F0,0F1,0B0,0B1")
    if [] in words:
        raise PlanError(
            f"{name}, line {words.index([]) + 1}: has no action; each line is a rank, and each rank has a "
            "stage: remove the line"
        )
    count = sum(map(len, words))
    rows = [
        [_action(name, f"line {n + 1}", word, None, count) for word in row] for n, row in enumerate(words)
    ]
    n_stages, n_micro = (1 + max(action[i] for row in rows for action in row) for i in (1, 2))
    return _checked(name, rows, n_stages, n_micro)


def from_lines(name: str, lines: Sequence[str], n_stages: int, n_micro: int) -> Schedule:
    """From words between blanks, one line per rank: `F0` is of the stage with the number of its line. Raises
    as `from_text`."""
    words, called = [line.split() for line in lines], f"schedule {name!r}"
    count = sum(map(len, words))
    rows = [
        [_action(called, f"stage {rank}", word, rank, count) for word in row]
        for rank, row in enumerate(words)
    ]
    schedule = _checked(called, rows, n_stages, n_micro)
    if [] in words:  # the stages are all on other ranks
        raise PlanError(f"{called}: the line of rank {words.index([])} has no action; give each rank a stage")
    return schedule


def _words(line: str) -> list[str]:
    """Of what computes."""
    words = [word.strip() for word in _OVERLAPPED.sub(r"\1,\2", line).split(",")]
    return [word for word in words if word and not _MESSAGE.fullmatch(word)]


def _action(name: str, where: str, word: str, stage: int | None, count: int) -> Action:
    """count: of all actions, more than there are stages or micro-batches."""
    match = _ACTION.fullmatch(word)
    if match is None or (stage is None and not match[1]):
        what = "write F or B and the number of the micro-batch, such as F0" if stage is not None else (
            "write the stage, F, B, I or W, and the micro-batch, such as 2F0"
        )  # fmt: skip
        raise PlanError(f"{name}, {where}: {word!r} is no action; {what}")
    number = {what: digits.lstrip("0") for what, digits in (("stage", match[1]), ("micro-batch", match[3]))}
    for what, digits in number.items():
        if len(digits) > len(str(count)) or int(digits or 0) >= count:
            raise PlanError(
                f"{name}, {where}: {word[:24]!r} is of {what} {digits[:12]}, in an order of {count} actions; "
                "number stages and micro-batches from 0, without gaps"
            )
    of_stage = int(number["stage"] or 0) if match[1] else stage or 0
    return Action(Op[match[2]], of_stage, int(number["micro-batch"] or 0))


def _checked(name: str, rows: Sequence[Sequence[Action]], n_stages: int, n_micro: int) -> Schedule:
    """A stage is where its first action is. name: how messages call it."""
    home: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            home.setdefault(action.stage, rank)
    rank_of_stage = [home.get(stage, stage % len(rows)) for stage in range(n_stages)]
    schedule = by_rank(rank_of_stage, n_micro, rows)
    try:
        check(schedule)
        check_ends(schedule)
    except (PlanError, DeadlockError) as error:
        raise type(error)(f"{name}: {error}") from error
    return schedule
