"""What a rank was at when a run stood still, and which rank all the others wait for.

every rank   Flight: what it does or waits for, its last instructions, pending messages, Python stacks
one rank     diagnose({rank: Flight}): along the waits to the rank that does not wait
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mpipipe.values import Value

LINKS = 6  # ranks of a long chain that are told, the nearest to its end
KEPT_CALLS = 8  # that a sign of life names


@dataclass(frozen=True)
class Recent(Value):
    """An instruction of the step that a rank is in, or was in last."""

    instruction: str
    ago_s: float  # since it began
    took_s: float | None  # None: it has not ended


@dataclass(frozen=True)
class Pending(Value):
    """A message that is posted and was not taken."""

    what: str  # "2F5"
    kind: str  # "send" or "receive"
    peer: int
    tag: int


@dataclass(frozen=True)
class Doing(Value):
    """What the main thread of a rank is at."""

    step: int  # of the run, counted from 1; 0 before the first
    what: str  # "F of stage 2, micro-batch 5"; of a rank that waits, what for
    waits_for: tuple[int, ...] = ()  # ranks, any of which may be the one; empty: it computes, reads or writes
    at: str = ""  # innermost line of Python


@dataclass(frozen=True)
class Flight(Value):
    """flight/rank-N.json"""

    rank: int
    host: str
    pid: int
    doing: Doing
    since_s: float  # for how long it has been at that
    recent: tuple[Recent, ...]  # oldest first
    pending: tuple[Pending, ...]
    stacks: dict[str, tuple[str, ...]]  # by the name of the thread, outermost call first


@dataclass(frozen=True)
class Calls(Value):
    """Those that a script has made of its pipelines, on one rank."""

    number: int = 0  # how many it has begun, also within others
    newest: tuple[tuple[str, str], ...] = ()  # of these, oldest first: name, and where the script makes it
    within: bool = False  # it is in one now

    def and_then(self, name: str, at: str) -> Calls:
        """One more, which has begun."""
        return Calls(self.number + 1, (*self.newest, (name, at))[-KEPT_CALLS:], True)

    def of(self, number: int) -> tuple[str, str] | None:
        """One of them, counted from 1; None where it is not known."""
        back = self.number - number
        return self.newest[-1 - back] if 0 <= back < len(self.newest) else None


@dataclass(frozen=True)
class Sign(Value):
    """flight/rank-N.alive: a rank's last sign of life."""

    beat: int
    host: str
    pid: int
    doing: Doing
    counts: bool = True  # it runs instructions, so that their standstill is its own
    calls: Calls = Calls()  # of a script


def diagnose(
    records: Mapping[int, Flight], signs: Mapping[int, Sign], start: int, silent_s: float
) -> list[str]:
    """Lines: the waits that lead to the rank that does not wait, which is `start`, or what it waits for. A
    rank without a record is one that does not answer; signs: the last of each, `silent_s` ago or longer."""
    chains = [_chain(rank, records) for rank in [start, *sorted(records)]]
    *waiting, last = max((c for c in chains if c[-1] == chains[0][-1]), key=len)
    lines = []
    for rank, other in pairwise([*waiting, last][-LINKS:]):
        f = records[rank]
        lines.append(
            f"rank {rank} ({f.host}) waits for {f.doing.what} from rank {other}, since {f.since_s:.0f} s"
        )
    if last in waiting:
        ring = " and ".join(str(rank) for rank in sorted(waiting[waiting.index(last) :]))
        return [*lines, f"ranks {ring} wait for each other: a message is lost, or the program is at fault"]
    if last not in records:
        return [*lines, _silent(last, signs.get(last), silent_s)]
    f = records[last]
    where = f", at {f.doing.at}" if f.doing.at else ""
    return [*lines, f"rank {last} ({f.host}) is in {f.doing.what}, since {f.since_s:.0f} s{where}"]


def _chain(start: int, records: Mapping[int, Flight]) -> list[int]:
    """From rank to rank along the waits, to one that does not wait, does not answer, or has been passed."""
    chain = [start]
    while chain[-1] in records and (waits_for := records[chain[-1]].doing.waits_for):
        chain.append(_next(waits_for, records))
        if chain[-1] in chain[:-1]:
            break
    return chain


def _next(waits_for: Sequence[int], records: Mapping[int, Flight]) -> int:
    """Of the ranks that may be waited for: one that does not answer, one that does not wait, one that waits
    for a certain rank, or any."""

    def order(rank: int) -> tuple[int, int]:
        if rank not in records:
            return 0, rank
        return 1 + min(len(records[rank].doing.waits_for), 2), rank

    return min(waits_for, key=order)


def _silent(rank: int, sign: Sign | None, silent_s: float) -> str:
    why = "it is stopped or dead, its node is cut off, or a call in C holds the interpreter's lock"
    if sign is None:
        return f"rank {rank} has given no sign of life: {why}"
    doing = sign.doing
    was = f"waited for {doing.what}" if doing.waits_for else f"was in {doing.what}"
    return (
        f"rank {rank} ({sign.host}, pid {sign.pid}) gives no sign of life since {silent_s:.0f} s, when it "
        f"{was}, step {doing.step}: {why}"
    )
