"""How a job ends when something is wrong: one rank speaks, all stop, the exit code is not zero."""

from __future__ import annotations

import math
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mpipipe.cluster.comm import Communicator, RankLost
from mpipipe.cluster.launch import launcher_rank, say_past_launcher
from mpipipe.errors import MpipipeError
from mpipipe.planner.sizes import counted

OWN_LIMIT, TIME_OF_JOB = "the time limit", "the time of the job"  # as reasons to stop
TIMES = 3.0  # the longest step and save: what is left for the last ones
TO_GO_ON = "to go on from step "  # begins the note of an error that ends a run with a checkpoint
ASKED = "mpipipe: asked to stop"
UNLESS = (
    ", if all ranks are there (launchers send it also to those that are left when one has died) and have the "
    "time; if not, --resume goes on from the newest checkpoint there is"
)
_OURS = str(Path(__file__).parents[1]) + os.sep
SPEAK_FIRST_S = 2.0  # a launcher ends all at the first non-zero exit: let rank 0 say why


def end(comm: Communicator | None, error: BaseException) -> int:
    """Says what went wrong and ends every rank of the job; alone, returns the exit code."""
    rank = launcher_rank(os.environ) if comm is None else comm.rank
    if rank != 0:
        time.sleep(SPEAK_FIRST_S * (1 + min(rank, 10) / 10))  # of several, the lowest
        if comm is None:  # rank 0 has met the same
            return 1
    if isinstance(error, MpipipeError):
        notes: list[str] = getattr(error, "__notes__", [])
        where = [f"on rank {rank}"] if rank and all(note.startswith(TO_GO_ON) for note in notes) else []
        text = "\n  ".join([f"mpipipe: {error.kind}: {error}", *where, *notes])
    else:
        text = f"mpipipe: rank {rank} failed\n{traceback_text(error)}"
    print(text, file=sys.stderr, flush=True)
    if comm is not None and comm.size > 1:
        comm.abort(1)
    return 1


def traceback_text(error: BaseException) -> str:
    """As Python prints it. Of an error in code of the user's that mpipipe has called, without what lies
    between: twenty frames of ours say less than the one that raised."""
    left_out = 0
    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    while part is not None:
        ours = [place for place, frame in enumerate(part.stack) if frame.filename.startswith(_OURS)]
        called = part.stack[ours[-1] + 1 :] if ours else []
        if any(map(_is_user_s, called)):
            calling = [frame for frame in part.stack[: ours[-1]] if _is_user_s(frame)]
            left_out += ours[-1] + 1 - len(calling)
            part.stack = traceback.StackSummary.from_list([*calling, *called])
        part = part.__cause__ or part.__context__
    note = f"({counted(left_out, 'frame')} of mpipipe and Python left out)\n" if left_out else ""
    return note + "".join(whole.format()).rstrip()


def _is_user_s(frame: traceback.FrameSummary) -> bool:
    path = frame.filename
    installed = {"site-packages", "dist-packages"} & {*Path(path).parts}  # wherever a cluster keeps them
    return not (installed or path.startswith((_OURS, sysconfig.get_path("stdlib") + os.sep, "<frozen")))


def leave(comm: Communicator) -> None:
    """The end of a run that went well. Collective. Where ranks outlive one another this ends the process,
    with 0: MPI's own end waits for those that were lost, and with Open MPI 5.0's detector for all."""
    now = comm
    while now.successor is not None:
        now = now.successor
    with suppress(RankLost):  # of a spare, which nobody has missed; one that leaves is no loss any more
        now.barrier()
    if not comm.notices_loss:
        comm.close()
        return
    now.end_gone()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def stop_signals(says: bool = False) -> Iterator[list[str]]:
    """SIGTERM, SIGUSR1 and Ctrl-C ask for a stop after the current step; the list then holds the name.

    SIGUSR1 because it is what mpirun hands on without killing its ranks a second later. A second Ctrl-C
    interrupts at once. says: the first signal is answered by a line, as a step may take long.
    """
    asked: list[str] = []
    signals = 0  # the caller adds reasons of its own to `asked`

    def ask(number: int, _: object) -> None:
        nonlocal signals
        if signals and number == signal.SIGINT:
            raise KeyboardInterrupt
        signals += 1
        name = signal.Signals(number).name
        if says and signals == 1:  # past Python's files, within a write to which the signal may have come
            killed = number == signal.SIGTERM
            text = f"{ASKED} ({name}): after this step, with a checkpoint{UNLESS if killed else ''}"
            if not (killed and say_past_launcher(text)):
                os.write(2, f"{text}\n".encode())
        asked.append(name)

    before = {s: signal.signal(s, ask) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield asked
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


class TimeLimit:
    """Whether to stop now: early enough to save before `minutes` are over, or the time of the Slurm job is.

    >>> TimeLimit(None, {"SLURM_JOB_END_TIME": "1000"}, lambda: 930.0).reached(step_s=1.0, save_s=2.0)
    >>> TimeLimit(None, {"SLURM_JOB_END_TIME": "1000"}, lambda: 930.0).reached(step_s=30.0, save_s=2.0)
    'the time of the job'
    """

    def __init__(
        self, minutes: float | None, environ: Mapping[str, str], now: Callable[[], float] = time.time,
        began: float | None = None,
    ) -> None:  # fmt: skip
        """began: the second since the epoch from which `minutes` count; None = now."""
        self.now = now
        self.ends: list[tuple[str, float, float]] = []  # each with the seconds that are the least to be left
        if minutes is not None:
            end = (now() if began is None else began) + 60.0 * minutes
            self.ends.append((OWN_LIMIT, end, min(60.0, 6.0 * minutes)))
        job_end = environ.get("SLURM_JOB_END_TIME", "")
        if job_end.isdigit():
            self.ends.append((TIME_OF_JOB, float(job_end), 60.0))

    def left_s(self) -> float:
        """Seconds until the first end is near; infinite where there is none."""
        return min((end - least_s for _, end, least_s in self.ends), default=math.inf) - self.now()

    def reached(self, step_s: float, save_s: float) -> str | None:
        """The end that is near, as a reason to stop. step_s, save_s: seconds of the longest step and of the
        longest save so far."""
        needed_s, now = TIMES * (step_s + save_s), self.now()
        return next((why for why, end, least_s in self.ends if now >= end - max(least_s, needed_s)), None)
