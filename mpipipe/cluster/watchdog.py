"""A thread beside each rank's main thread: a run that stands still is explained and ended, never left so.

    flight/rank-N.alive    written every few seconds; each rank reads that of the next rank
    flight/rank-N.stack    stacks by a thread in C, where the interpreter's lock was held for too long
    flight/called          one rank has seen a standstill: all write their records
    flight/rank-N.json     the record (`Flight`)
    flight/diagnosis.txt   what that rank made of them all, before every rank leaves with exit code 75

A standstill is a rank whose counter of instructions rests for longer than the limit, or that gives no sign
of life for as long (stopped, dead, cut off). Outside of steps nothing counts instructions, and some things
take an hour: there it is a rank that neither computes nor reads nor writes, and all others that wait for it,
also those that are within a step already.
Records travel through files, as MPI may be what is stuck, and each clock is compared with itself alone.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol, TypeVar

from mpipipe.cluster.flight import Doing, Flight, Pending, Recent, Sign, diagnose
from mpipipe.cluster.shared import look_anew
from mpipipe.values import from_json, to_json

FOLDER, CALLED, DIAGNOSIS = "flight", "called", "diagnosis.txt"
STOOD_STILL = 75  # exit code; EX_TEMPFAIL of sysexits.h: worth another try
AUTO_S, AUTO_STEPS = 60.0, 10.0  # the limit is the larger one: seconds, and predicted steps
SIGN_BYTES = 2048  # of a sign of life at least, so that it seldom changes its length
OTHER_S = 600.0  # at least, outside of steps: planning, checkpoints and drawings count no instructions
WORK_S, WORK_BYTES = 30.0, 1 << 24  # computed, read or written meanwhile by a rank that works at all
PERIOD_S = 2.0
GATHER_S = 5.0  # for the records of the others
PASSED_ON_S = 0.5
_RECORDS = "records of all ranks: "
V = TypeVar("V", Flight, Sign)
_CARRIERS = ("mpipipe/cluster/mpi.py", "mpipipe/cluster/local.py")


class View(Protocol):
    """What a watchdog sees of its rank; asked from another thread."""

    def progress(self) -> Hashable:
        """Another value whenever an instruction has begun or ended."""
        ...

    def doing(self, stack: list[FrameType], phase: str) -> Doing: ...
    def recent(self) -> tuple[Recent, ...]: ...
    def pending(self) -> tuple[Pending, ...]: ...


class Outside:
    """The view where nothing is run: the stack alone. size: 0 where nobody knows who is left."""

    def __init__(self, rank: int, size: int) -> None:
        self.others = tuple(other for other in range(size) if other != rank)

    def progress(self) -> Hashable:
        return None

    def doing(self, stack: list[FrameType], phase: str) -> Doing:
        call = waiting(stack)
        if call is None:
            return Doing(0, phase, at=line(stack[-1]) if stack else "")
        return Doing(0, f"{phase} ({line(stack[call - 1])})", self.others, line(stack[call]))

    def recent(self) -> tuple[Recent, ...]:
        return ()

    def pending(self) -> tuple[Pending, ...]:
        return ()


def say(text: str) -> None:
    """On the standard error, where there is one still."""
    with suppress(OSError):  # of a launcher that is gone
        sys.stderr.write(text)
        sys.stderr.flush()


class Watchdog:
    """Of one rank; `start` it, and `close` it in time, since a rank that has ended gives no sign either."""

    setting = "run.watchdog"  # where its limit is set

    def __init__(
        self, rank: int, size: int, run_dir: Path, limit: float | Literal["auto", "off"],
        thread: int | None = None, leave: Callable[[int], object] = os._exit,
    ) -> None:  # fmt: skip
        """rank: of a spare, whose rest is no standstill, `size` or more. limit: seconds. thread: the one that
        is watched; None = the main thread."""
        self.rank, self.size, self.folder = rank, size, run_dir / FOLDER
        self.given, self.limit_s = limit, limit if isinstance(limit, float | int) else AUTO_S
        self._spare = rank >= size
        self.phase = "its wait, as a spare" if self._spare else "the start"
        self._counts, self._beats = False, 0
        self.view: View = Outside(rank, size)
        self._neighbours = size > 1
        self._watched = thread or threading.main_thread().ident
        self._exit, self._host = leave, socket.gethostname()
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)
        self._thread.name = "mpipipe-watchdog"

    def start(self) -> None:
        if self.given == "off":
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stack = self._file("stack").open("wb")
        self._beat()  # at once: the first steps may be over before the thread's first round
        self._thread.start()

    def alone(self) -> None:
        """From now on it watches its own rank only: others were lost, and are not known yet. The last sign of
        a rank 0 that was lost goes, so that nobody outside takes the recovery for a standstill."""
        self._neighbours, self.view = False, Outside(self.rank, 0)
        if self.rank != 0:
            with suppress(OSError):
                self._file("alive", 0).unlink()

    def close(self, taken: int = 0) -> None:
        """taken: so many ranks go on under new numbers, and their files may be there already."""
        if self._thread.ident is None or self._ended.is_set():  # not started, or closed
            return
        self._stop()
        if self.rank >= taken:
            for kind in ("alive", "stack"):
                with suppress(OSError):
                    self._file(kind).unlink()
        if not taken:
            with suppress(OSError):
                self.folder.rmdir()  # by the last one

    def _stop(self) -> None:
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._stack.close()

    def watch(self, view: View, step_s: float) -> None:
        """From now on it sees the instructions. step_s: predicted seconds of a step, with a
        mirror where there is one."""
        if self.given == "auto":
            self.limit_s = max(AUTO_S, AUTO_STEPS * step_s)
        self.view = view

    @contextmanager
    def during(self, phase: str, counts: bool = False) -> Iterator[None]:
        """counts: instructions are run all the time, so that their standstill is the rank's."""
        before = self.phase, self._counts
        self.phase, self._counts = phase, counts
        try:
            yield
        finally:
            self.phase, self._counts = before

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        period_s, last = min(PERIOD_S, self.limit_s / 6), time.monotonic()
        self._seen: dict[str, Hashable] = {}  # the last of each kind
        self._since = self._asked = self._neighbour_since = last
        self._neighbour: Hashable = None
        while not self._ended.wait(period_s):
            now = time.monotonic()
            if now - last > 3 * period_s:  # this process itself was stopped: that is nobody's standstill
                self._since += now - last
                self._neighbour_since += now - last
            last = now
            self._beat()
            look_anew(self.folder)
            try:
                if (why := self._standstill(now)) or (self.folder / CALLED).exists():
                    self._end(why)
                    return
            except OSError:
                continue  # of the file system, which may be back next time

    def _beat(self) -> None:
        self._give_sign()
        with suppress(OSError, ValueError):  # it may be closed
            self._stack.seek(0)
            self._stack.truncate()
            faulthandler.dump_traceback_later(self.limit_s, file=self._stack)

    def _give_sign(self) -> None:
        self._beats += 1
        with suppress(OSError):  # of a disk that is full
            _overwrite(self._file("alive"), to_json(self._sign(), None).encode().ljust(SIGN_BYTES))

    def _sign(self) -> Sign:
        return Sign(self._beats, self._host, os.getpid(), self._doing(), self._counts)

    def _standstill(self, now: float) -> tuple[int, str, float] | None:
        """(the rank where the explanation begins, why, for how many seconds)."""
        if self._spare:
            return None
        seen: dict[str, Hashable] = {"phase": self.phase, "instructions": self.view.progress()}
        seen |= {} if self._counts else self._work()
        if not seen.items() <= self._seen.items():
            self._seen |= seen
            self._since = now
        limit_s = self.limit_s if self._counts else max(self.limit_s, OTHER_S)
        # In time: whom this one waits for needs some of the limit to get here, once it goes on.
        if self._counts and now - max(self._since, self._asked) > limit_s / 2:
            self._asked = now
            if self._waits_for_work():
                self._since = now
        if (rest_s := now - self._since) > limit_s and (self._counts or not self._waits_for_work()):
            return self.rank, f"no progress for {rest_s:.0f} s, the limit is {limit_s:.0f} s", rest_s
        return self._silence(now) if self._neighbours else None

    def _silence(self, now: float) -> tuple[int, str, float] | None:
        """Of the next rank, as `_standstill`."""
        after = (self.rank + 1) % self.size
        sign = sign_of_life(self.folder, after)
        if sign is None or sign != self._neighbour:
            self._neighbour, self._neighbour_since = sign, now
        if (rest_s := now - self._neighbour_since) > self.limit_s:
            return after, f"no sign of life for {rest_s:.0f} s, the limit is {self.limit_s:.0f} s", rest_s
        return None

    def _work(self) -> dict[str, Hashable]:
        """What the watched thread has computed, and this process read and written. While it waits for
        another rank, which takes a core too: in which of its calls."""
        stack = stack_of(self._watched)
        if (call := waiting(stack)) is not None:
            return {"waits": tuple(frame.f_lasti for frame in stack[:call])}
        return {"computed": _computed(self._watched), "moved": _moved()}

    def _waits(self) -> bool:
        return waiting(stack_of(self._watched)) is not None

    def _waits_for_work(self) -> bool:
        """Whether this rank waits, and one of the others does not: that one knows whether it stands still. Of
        those that run instructions as this one does, it would not know it later."""
        if not self._neighbours or not self._waits():
            return False
        others = (rank for rank in range(self.size) if rank != self.rank)  # rank 0 first, which does most
        signs = (sign for _, sign in self._read(Sign, "alive", others))
        return any(not sign.doing.waits_for and not (self._counts and sign.counts) for sign in signs)

    # -- the end -------------------------------------------------------------------------------

    def _end(self, why: tuple[int, str, float] | None) -> None:
        """Leaves, also where nothing can be written."""
        called = why is not None and self._call()
        with suppress(OSError):
            self._file("json").write_text(to_json(self._record()))
        if why is not None and called:
            self._explain(*why)
        else:
            with suppress(OSError):
                self._await(lambda: (self.folder / DIAGNOSIS).exists(), 2 * GATHER_S)
        self._leave(STOOD_STILL)

    def _leave(self, code: int) -> None:
        """A launcher may end all at the first exit, whoever's it is, and drop what it has not passed on yet
        of what another rank has said (MPICH's and Intel MPI's do)."""
        time.sleep(PASSED_ON_S)
        self._exit(code)

    def _call(self) -> bool:
        """Whether this rank is the first one."""
        try:
            (self.folder / CALLED).open("x").close()
        except FileExistsError:
            return False
        except OSError:  # nobody can be called: each one explains what it sees
            return True
        return True

    def _explain(self, start: int, why: str, rest_s: float) -> None:
        records: dict[int, Flight] = {}

        def all_there() -> bool:
            records.update(self._read(Flight, "json", set(range(self.size)) - set(records)))
            return len(records) == self.size

        self._await(all_there, GATHER_S)
        signs = dict(self._read(Sign, "alive", set(range(self.size)) - set(records)))
        lines = diagnose(records, signs, start, rest_s)
        records_of = f"{_RECORDS}{self.folder}; the run ends with exit code {STOOD_STILL}"
        lines = [f"mpipipe: watchdog: {why} ({self.setting})", *lines, records_of]
        for rank in signs:
            with suppress(OSError):
                if stack := self._file("stack", rank).read_text(errors="replace"):
                    lines += [f"rank {rank} holds the interpreter's lock:", *stack.splitlines()]
        text = "\n  ".join(lines) + "\n"
        with suppress(OSError):
            (self.folder / DIAGNOSIS).write_text(text)
        say(text)

    def _await(self, ready: Callable[[], bool], limit_s: float) -> None:
        """For files of other ranks."""
        end = time.monotonic() + limit_s
        while True:
            look_anew(self.folder)
            if ready() or time.monotonic() > end:
                return
            time.sleep(0.05)

    def _record(self) -> Flight:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {
            names.get(ident, str(ident)): tuple(x.rstrip() for x in traceback.format_stack(frame))
            for ident, frame in sys._current_frames().items()
        }
        return Flight(
            self.rank, self._host, os.getpid(), self._doing(), time.monotonic() - self._since,
            self.view.recent(), self.view.pending(), stacks,
        )  # fmt: skip

    def _doing(self) -> Doing:
        with suppress(Exception):  # of a view of what changes meanwhile; a sign of life is due all the same
            return self.view.doing(stack_of(self._watched), self.phase)
        return Doing(0, self.phase)

    def _read(self, cls: type[V], kind: str, ranks: Iterable[int]) -> Iterator[tuple[int, V]]:
        """The files of these ranks that are there and whole."""
        for rank in ranks:
            with suppress(OSError, ValueError):
                yield rank, from_json(cls, self._file(kind, rank).read_bytes())

    def _file(self, kind: str, rank: int | None = None) -> Path:
        return self.folder / f"rank-{self.rank if rank is None else rank}.{kind}"


def _overwrite(path: Path, data: bytes) -> None:
    """In place and at once: a rank that is stopped meanwhile leaves a whole sign, on a full disk too."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(file, data, 0)
        os.ftruncate(file, len(data))
    finally:
        os.close(file)


def _computed(thread: int | None) -> int:
    """By a thread, in units of `WORK_S`."""
    return int(time.clock_gettime(time.pthread_getcpuclockid(thread or 0)) / WORK_S)


def _moved() -> int:
    """Read and written by this process, in units of `WORK_BYTES` (Linux, proc(5)); 0 where nobody says."""
    with suppress(OSError):
        fields = (line.split() for line in Path("/proc/self/io").read_text().splitlines())
        return sum(int(count) for name, count in fields if name in ("rchar:", "wchar:")) // WORK_BYTES
    return 0


def sign_of_life(folder: Path, rank: int) -> Hashable:
    """Another value for each sign that a rank has given; None: it gives none yet, or has closed. On a full
    disk the file is empty, but opened anew each time."""
    path = folder / f"rank-{rank}.alive"
    try:
        return path.stat().st_mtime_ns, path.read_bytes()
    except FileNotFoundError:
        return None


def clear(run_dir: Path) -> None:
    """Before a run: what an earlier one left is kept as flight.before if it was explained, else removed."""
    folder, before = run_dir / FOLDER, run_dir / f"{FOLDER}.before"
    with suppress(OSError):
        if os.path.exists(folder / DIAGNOSIS):  # `Path.exists` raises where a file system fails for a moment
            shutil.rmtree(before, ignore_errors=True)
            folder.rename(before)
        shutil.rmtree(folder)


def explained(run_dir: Path) -> str:
    """The rank that all waited for when the run stood still; empty where it did not."""
    look_anew(run_dir / FOLDER)
    try:
        text = (run_dir / FOLDER / DIAGNOSIS).read_text()
    except OSError:
        return ""
    return text.partition(f"\n  {_RECORDS}")[0].rpartition("\n  ")[2]


# -- stacks --------------------------------------------------------------------------------------


def stack_of(thread: int | None) -> list[FrameType]:
    """Outermost call first; empty for a thread that has ended."""
    frame = sys._current_frames().get(thread or 0)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def waiting(stack: list[FrameType]) -> int | None:
    """Where on a stack the call into a carrier is; None where there is none."""
    found = (i for i, frame in enumerate(stack) if frame.f_code.co_filename.endswith(_CARRIERS))
    return next(found, None)


def line(frame: FrameType) -> str:
    place = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f"{place}:{frame.f_lineno} in {frame.f_code.co_name}"
