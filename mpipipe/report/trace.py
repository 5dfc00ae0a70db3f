"""timeline.json: one step of a run, predicted and measured, and its memory step by step.

    {"version": 1,
     "programs": [{"rank_of_stage": [..], "n_micro": .., "receive_window": .., "codes": [[..], ..],
                   "other_copies": [[..], ..], "eager": false, "nodes": [..]}],
     "timelines": {"measured": {"program": 0, "times_ns": [[..], ..], "memory_bytes": [[..], ..]}},
     "resident_bytes": [[..], ..], "steps": [..]}

Integers only, per rank in one flat row: six codes (the fields of `Instr`) and two times (start, end) per
instruction. Timelines of the same program share it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from mpipipe.errors import MpipipeError, ReportError
from mpipipe.planner.walk import match
from mpipipe.values import Instr, Op, Program, Timeline, Value, to_json

TRACE = "timeline.json"
VERSION = 1
_MOST_POINTS = 1000  # of the memory of a long run: more than a screen has columns
Rows = tuple[tuple[int, ...], ...]  # by rank
Number = TypeVar("Number", np.int32, np.int64)


@dataclass(frozen=True, eq=False)
class Trace:
    """timelines: "predicted" and "measured", or the former alone. resident_bytes: per rank the highest of
    each remembered step; where a long run was thinned out, of each run of steps. steps: the last of each."""

    timelines: dict[str, Timeline]
    resident_bytes: Rows
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Program(Value):
    rank_of_stage: tuple[int, ...]
    n_micro: int
    receive_window: int
    codes: Rows
    other_copies: tuple[tuple[int, ...], ...] = ()
    eager: bool = False
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Timeline(Value):
    program: int
    times_ns: Rows
    memory_bytes: Rows


@dataclass(frozen=True)
class _File(Value):
    version: int
    programs: tuple[_Program, ...]
    timelines: dict[str, _Timeline]
    resident_bytes: Rows
    steps: tuple[int, ...]


def write_trace(path: str | Path, trace: Trace) -> None:
    """Raises OSError."""
    programs = {t.program.hash: t.program for t in trace.timelines.values()}
    place = {key: index for index, key in enumerate(programs)}
    file = _File(
        version=VERSION,
        programs=tuple(
            _Program(
                p.rank_of_stage, p.n_micro, p.receive_window, _rows(p.codes), p.other_copies, p.eager, p.nodes
            )
            for p in programs.values()
        ),
        timelines={
            name: _Timeline(
                place[t.program.hash],
                _rows([np.rint(times * 1e9).astype(np.int64) for times in t.times]),
                _rows(t.memory_bytes),
            )
            for name, t in trace.timelines.items()
        },
        resident_bytes=trace.resident_bytes,
        steps=trace.steps,
    )
    Path(path).write_text(to_json(file, indent=None) + "\n", encoding="utf-8")


def read_trace(path: str | Path) -> Trace:
    """Inverse of `write_trace`, times to the nanosecond. Raises ReportError; what it returns can be drawn."""
    file = _read(Path(path))
    try:
        return _trace(file)
    except (MpipipeError, ValueError, OverflowError) as error:
        raise ReportError(f"{path}: damaged: {error}; run again to write it anew") from error


def _trace(file: _File) -> Trace:
    """Raises ValueError, OverflowError, DeadlockError if a message has one end only."""
    programs = [
        Program(
            p.rank_of_stage,
            p.n_micro,
            p.receive_window,
            _arrays(p.codes, np.int32, len(Instr._fields)),
            p.other_copies,
            p.eager,
            p.nodes,
        )
        for p in file.programs
    ]
    for program in programs:
        _check_codes(program)
        match(program)
    timelines = {
        name: Timeline(
            programs[t.program],
            tuple(times / 1e9 for times in _arrays(t.times_ns, np.int64, 2)),
            tuple(np.array(row, np.int64) for row in t.memory_bytes),
        )
        for name, t in file.timelines.items()
    }
    return Trace(timelines, file.resident_bytes, file.steps)


def thin(values: Sequence[int], steps: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """At most a thousand points of one value per step, evenly, each the highest of the steps that it stands
    for; and the last step of each."""
    every = -(-len(steps) // _MOST_POINTS) or 1
    runs = [slice(i, i + every) for i in range(0, len(steps), every)]
    return tuple(max(values[run]) for run in runs), tuple(steps[run][-1] for run in runs)


def _read(path: Path) -> _File:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: cannot be read ({error}); a run writes it at its end") from error
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ReportError(f"{path}: is cut short or no JSON ({error}); run again to write it anew") from error
    version = value.get("version") if isinstance(value, dict) else None
    if version != VERSION:
        raise ReportError(
            f"{path}: version {version} of the format, this mpipipe reads version {VERSION}; "
            "read it with the mpipipe that wrote it"
        )
    try:
        file = TypeAdapter(_File).validate_python(value)
        _check(file)
    except ValidationError as error:
        first = error.errors()[0]
        raise ReportError(f"{path}: damaged at {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except ValueError as error:
        raise ReportError(f"{path}: damaged: {error}; run again to write it anew") from error
    return file


def _check(file: _File) -> None:
    """Every rank has as many times and bytes as instructions. Raises ValueError."""
    for name, t in file.timelines.items():
        if not 0 <= t.program < len(file.programs):
            raise ValueError(f"{name} is of program {t.program} of {len(file.programs)}")
        codes = [len(row) for row in file.programs[t.program].codes]
        times = [3 * len(row) for row in t.times_ns]
        memory = [6 * len(row) for row in t.memory_bytes]
        if not codes == times == memory:
            raise ValueError(
                f"{name} has {[n // 6 for n in times]} times and {[n // 6 for n in memory]} sizes "
                f"for {[n // 6 for n in codes]} instructions"
            )


def _check_codes(program: Program) -> None:
    """There are ranks, each with instructions, as many NORMs as the others, and codes that mean something;
    every stage has a rank in each copy. Raises ValueError."""
    stages, ranks = (-1, program.n_stages), (-1, len(program.codes))
    micros = (-1, program.n_micro)
    limits = {"op": (0, len(Op)), "stage": stages, "micro": micros, "other": stages, "peer": ranks}
    for rank, codes in enumerate(program.codes):
        if not len(codes):
            raise ValueError(f"rank {rank} has no instructions")
        for column, (name, (low, end)) in enumerate(limits.items()):
            if wrong := codes[(codes[:, column] < low) | (codes[:, column] >= end), column].tolist():
                raise ValueError(f"rank {rank} has {name} {wrong[0]}, which is not in {low} to {end - 1}")
    for homes in program.copies:
        if len(homes) != program.n_stages or not {*homes} <= {*range(len(program.codes))}:
            raise ValueError(f"its {program.n_stages} stages are on ranks {list(homes)}")
    norms = [int((codes[:, 0] == Op.NORM).sum()) for codes in program.codes]
    if len(set(norms)) != 1:
        raise ValueError(f"its ranks have {norms} gradient norms, which all have together")


def _rows(arrays: Sequence[NDArray[np.integer]]) -> Rows:
    return tuple(tuple(array.ravel().tolist()) for array in arrays)


def _arrays(rows: Rows, dtype: type[Number], columns: int) -> tuple[NDArray[Number], ...]:
    return tuple(np.array(row, dtype).reshape(-1, columns) for row in rows)
