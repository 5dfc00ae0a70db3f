"""What this process has once: its place in the MPI world, and its memory above the imports."""

from __future__ import annotations

import atexit
import gc
import sys
from typing import Any, NoReturn

from mpipipe.cluster.calls import CallsWatchdog, Limit, Unwatched, watch_calls
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.ending import end, leave
from mpipipe.cluster.memory import KEPT_BYTES, Memory, PeakMemory, keep_freed_memory
from mpipipe.cluster.mpi import connect
from mpipipe.errors import MpipipeError
from mpipipe.graph.capture import warm_up_tracer
from mpipipe.ops import device
from mpipipe.ops.reuse import reuse_freed_blocks

_world: Communicator | None = None
_calls: CallsWatchdog | Unwatched | None = None
_memory: PeakMemory | None = None


def world() -> Communicator:
    """The communicator of this process, made once. From here on an error on one rank, or a `sys.exit` with
    one, ends all of them."""
    global _world
    if _world is None:
        _world = connect()
        if _world.size > 1:
            _end_together(_world)
        else:
            _say_shortly(_world)
    return _world


def calls_of_script(limit: Limit) -> CallsWatchdog | Unwatched:
    """What watches, from the first pipeline on, that the ranks make the same calls. Collective at first."""
    global _calls
    if _calls is None:
        _calls = watch_calls(world(), limit)
    return _calls


def _say_shortly(comm: Communicator) -> None:
    """An error that is the user's to mend is its message alone, as on several ranks."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, at: Any) -> None:
        if isinstance(error, MpipipeError):
            end(comm, error)
        else:
            before(kind, error, at)

    sys.excepthook = hook


def _end_together(comm: Communicator) -> None:
    exit_python, failed = sys.exit, [False]

    def clear_up() -> None:
        if _calls is not None:
            _calls.clear_up()

    def hook(kind: type[BaseException], error: BaseException, at: Any) -> None:
        clear_up()
        end(comm, error)

    def note_exit(status: Any = None) -> NoReturn:
        failed[0] = status not in (None, 0)
        exit_python(status)

    def at_exit() -> None:  # before MPI's own, in which the other ranks would be waited for
        if failed[0]:
            clear_up()
            comm.abort(1)
        elif comm.notices_loss:
            leave(comm)

    sys.excepthook, sys.exit = hook, note_exit
    atexit.register(at_exit)


def resident_memory() -> PeakMemory:
    """What this process holds above its imports, the tracer's too; counted from the first call."""
    global _memory
    if _memory is None:
        keep_freed_memory()
        reuse_freed_blocks(KEPT_BYTES)
        warm_up_tracer()
        _memory = PeakMemory()
    return _memory


def imports_are_done() -> None:
    """What there is now, with what the tracer imports at its first use, stays to the end: no collection of
    garbage looks through it again. That would take 0.15 s each time, several times while a run starts."""
    gc.disable()
    warm_up_tracer()
    gc.freeze()
    gc.enable()


def memory_in_use() -> Memory:
    """That in which this rank computes."""
    resident = resident_memory()
    return resident if device.on_host() else device.DeviceMemory()
