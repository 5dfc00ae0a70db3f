"""A script with pipelines: do all its ranks make the same calls? The watchdog of runs, for scripts.

Every rank runs the script, and all methods of `Pipeline` are collective: the n-th call of each rank is the
n-th call of all. One that stands behind `if pipe.rank == 0:` meets another call on the other ranks, or the
end of their script. Each rank's sign of life says which calls it has made, so the first difference is found
as soon as two ranks have gone apart:

    rank 0   Pipeline   Pipeline.fit   Pipeline.save
    rank 1   Pipeline   Pipeline.fit   the end of the script      <-- told, and all ranks end

A rank between two calls may do what it wants for as long as it wants; when others wait for it, that is said.
Within a call a standstill is one of the watchdog. Pipelines that are given a `comm` are not watched, and a
rank that never makes the first one is not noticed: the folder of the signs is agreed on there.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Literal

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.flight import Calls, Sign
from mpipipe.cluster.node import cache_folder
from mpipipe.cluster.shared import seen
from mpipipe.cluster.watchdog import PERIOD_S, View, Watchdog, line, say
from mpipipe.errors import MpipipeError
from mpipipe.planner.sizes import numbered

NOTE_S = 30.0  # of waiting for a rank that has not come to a call, before that is said
HEARD_S = 3.5 * PERIOD_S  # until all signs tell of a call, and each has been read twice by the rank before it
SEEN_S = 2.0  # for the other nodes to see the folder of the signs
OLD_S = 86400.0  # since anything was written there: a folder that was left over
MOST = 4  # ranks that a note names
END, MARK = "the end of the script", "signs"
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
Limit = float | Literal["auto", "off"]


class Unwatched:
    """Of one rank, and of a run, which has a watchdog of its own."""

    def made(self, name: str, view: View | None = None, step_s: float = 0.0,
             counts: bool = False) -> AbstractContextManager[None]:  # fmt: skip
        """Around a call. counts: it runs instructions all the time; step_s: predicted seconds of a step."""
        return nullcontext()

    def outside(self) -> AbstractContextManager[None]:
        """Around what is the user's own within a call."""
        return nullcontext()

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Around what may take minutes and runs no instruction."""
        return nullcontext()

    def clear_up(self) -> None:
        """What the ranks have left for each other."""


class CallsWatchdog(Watchdog):
    """Of one rank. folder: one that all ranks see, for it alone."""

    setting = "Pipeline(watchdog=...)"

    def __init__(self, comm: Communicator, folder: Path, limit: Limit) -> None:
        super().__init__(comm.rank, comm.size, folder, limit, leave=comm.abort)
        self.calls, self.phase = Calls(), "the script"
        self._told = set[tuple[str, str]]()  # of waits
        self._number, self._begun_at = 0, 0.0  # of the newest call, as the thread has seen it
        self._apart = self._found = list[str]()  # what is said of ranks that are; what one look has found
        self._failed = False  # this call has, and has waited for what the others call
        self._written, self._said_within = threading.RLock(), False  # of the last sign
        self._process = os.getpid()

    @contextmanager
    def made(self, name: str, view: View | None = None, step_s: float = 0.0,
             counts: bool = False) -> Iterator[None]:  # fmt: skip
        before, at = self.calls.within, _of_the_script()
        if not before:
            self._watched, self._failed = threading.get_ident(), False
            if view is not None:
                self.watch(view, step_s)
        self.calls = self.calls.and_then(name, at)
        try:
            with self.during(f"{name}, {at}", counts):
                yield
        except Exception as error:
            if not (self._failed or isinstance(error, MpipipeError)):
                self._failed = True
                time.sleep(HEARD_S)  # messages of two calls may have met: the thread ends it, if so
            raise
        finally:
            self.calls = replace(self.calls, within=before)
            self._say_outside()

    @contextmanager
    def outside(self) -> Iterator[None]:
        before = self.calls.within
        self.calls = replace(self.calls, within=False)
        try:
            with self.during("the script"):
                self._say_outside()
                yield
        finally:
            self.calls = replace(self.calls, within=before)

    def finish(self) -> None:
        """At the end of the script. The sign stays for those that still wait; the last rank clears up."""
        if os.getpid() != self._process:  # of a child that was forked
            return
        with self.made(END):
            self._stop()
            self._give_sign()
        with suppress(OSError):
            self._file("ended").touch()
            if len(list(self.folder.glob("*.ended"))) == self.size:
                self.clear_up()

    def clear_up(self) -> None:
        """Where no rank is to look there any more."""
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()
        self._stack.close()  # NFS keeps a file that is open, and its folder
        shutil.rmtree(self.folder.parent, ignore_errors=True)

    def _say_outside(self) -> None:
        """At once, where the last sign says that this rank is within a call: what comes now may hold the
        interpreter's lock, so that the thread gives none. It is written once between two beats at most."""
        with self._written:
            if self._said_within and not self.calls.within:
                self._give_sign()

    # -- the thread ----------------------------------------------------------------------------

    def _give_sign(self) -> None:
        with self._written:
            super()._give_sign()

    def _sign(self) -> Sign:
        sign = replace(super()._sign(), calls=self.calls)
        self._said_within = sign.calls.within
        if threading.get_ident() != self._watched:
            return sign
        return replace(sign, doing=replace(sign.doing, at=_of_the_script()))  # not this line here

    def _standstill(self, now: float) -> tuple[int, str, float] | None:
        mine = self.calls
        found = self._compared([(self.rank + 1) % self.size])  # so all are, in a ring
        self._apart = found if found == self._found else []  # a sign may be read while it is written
        self._found = found
        if self._apart:
            return self.rank, self._apart[0], 0.0
        if mine.number != self._number:
            self._number, self._begun_at, self._since = mine.number, now, now
        if not mine.within:
            self._since = now
            return None
        if now - self._begun_at > NOTE_S and mine.newest[-1] not in self._told:
            self._say_who_is_missing(now - self._begun_at)
        return super()._standstill(now)

    def _silence(self, now: float) -> tuple[int, str, float] | None:
        """Between two calls a rank may be for long in a call in C that holds the interpreter's lock."""
        after = (self.rank + 1) % self.size
        if not any(sign.calls.within for _, sign in self._read(Sign, "alive", [after])):
            self._neighbour_since = now
            return None
        return super()._silence(now)

    def _say_who_is_missing(self, since_s: float) -> None:
        """Once for each place, by the rank before those that have not come there."""
        mine, missing = self.calls, list[str]()
        after = ((self.rank + i) % self.size for i in range(1, self.size))
        for rank, sign in self._read(Sign, "alive", after):
            if sign.calls.within or sign.calls.number >= mine.number:
                break
            missing.append(f"rank {rank} is at {sign.doing.at or 'its start'}")
        if not missing:
            return
        self._told.add(mine.newest[-1])
        name, at = mine.newest[-1]
        more = f", and {len(missing) - MOST} more" if len(missing) > MOST else ""
        say(
            f"mpipipe: note: rank {self.rank} waits in {name} ({at}) since {since_s:.0f} s: "
            f"{', '.join(missing[:MOST])}{more}, outside of any call; all ranks must make this one\n"
        )

    def _end(self, why: tuple[int, str, float] | None) -> None:
        """Of ranks that have gone apart the first that has seen it speaks, and ends the others."""
        if not self._apart:
            super()._end(why)
            return
        if self._call():
            lines = self._compared(range(self.size)) or self._apart
            say("mpipipe: error: " + "\n  ".join(lines) + "\n")
            self.clear_up()
        else:
            time.sleep(SEEN_S)
        self._leave(1)

    def _compared(self, others: Iterable[int]) -> list[str]:
        """As `apart`, of this rank and others."""
        calls = {rank: sign.calls for rank, sign in self._read(Sign, "alive", others)}
        return apart(calls | {self.rank: self.calls})


def apart(calls: Mapping[int, Calls]) -> list[str]:
    """What to say of ranks that do not make the same calls; nothing where all that is known agrees.

    >>> one, other = Calls().and_then("Pipeline.fit", "a.py:7"), Calls().and_then("Pipeline.save", "a.py:9")
    >>> apart({0: one, 1: one}), len(apart({0: one, 1: other}))
    ([], 4)
    """
    first = min(c.number - len(c.newest) for c in calls.values()) + 1
    for number in range(first, max(c.number for c in calls.values()) + 1):
        made = {rank: call for rank, c in sorted(calls.items()) if (call := c.of(number))}
        if len({name for name, _ in made.values()}) < 2:
            continue
        lines = []
        for call in dict.fromkeys(made.values()):
            who = numbered("rank", [rank for rank in made if made[rank] == call])
            lines.append(f"{who}: {', '.join(filter(None, call))}")
        return [
            "the ranks of this script make different calls, and would wait for each other for ever", *lines,
            "each call of a Pipeline is made by all ranks, in the same order: take it out of "
            "`if pipe.rank == 0:`; files and lines come from one rank by themselves (`save`, `say`)",
        ]  # fmt: skip
    return []


def watch_calls(comm: Communicator, limit: Limit) -> Unwatched | CallsWatchdog:
    """To the end of this process, where there is a folder for the signs. limit: seconds. Collective."""
    limit = comm.bcast_object(limit)
    folder = None if comm.size == 1 or limit == "off" else _shared_folder(comm)
    if folder is None:
        return Unwatched()
    dog = CallsWatchdog(comm, folder, limit)
    dog.start()
    atexit.register(dog.finish)
    return dog


def _shared_folder(comm: Communicator) -> Path | None:
    """A new one; None where not all ranks see it. Collective."""
    made = comm.bcast_object(_new_folder(max(comm.node_of_rank) > 0) if comm.rank == 0 else None)
    if made is None or all(comm.allgather_object(seen(made / MARK, SEEN_S))):
        return made
    if comm.rank == 0:
        shutil.rmtree(made, ignore_errors=True)
    return None


def _new_folder(several: bool) -> Path | None:
    """For several nodes below the cache, as they mostly share the home."""
    with suppress(OSError):
        within = cache_folder() if several else Path(tempfile.gettempdir())
        if within is not None:
            within.mkdir(parents=True, exist_ok=True)
            _remove_old(within)
            made = Path(tempfile.mkdtemp(prefix="mpipipe-", dir=within))
            (made / MARK).touch()
            return made
    return None


def _remove_old(within: Path) -> None:
    """The folders of scripts that could not: they stood still, or were killed."""
    for folder in within.glob("mpipipe-*"):
        with suppress(OSError):  # of another user, or gone
            if (folder / MARK).is_file():
                newest_s = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
                if time.time() - newest_s > OLD_S:
                    shutil.rmtree(folder)


def _of_the_script() -> str:
    """The line that makes this call: the innermost one that is not of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE, _CONTEXTLIB)):
        frame = frame.f_back
    return line(frame) if frame is not None else ""


_CONTEXTLIB = contextmanager.__code__.co_filename
