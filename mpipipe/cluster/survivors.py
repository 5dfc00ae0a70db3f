"""What is left of an MPI world after a rank was lost: User Level Failure Mitigation (Bland et al. 2013).

    an error says so  ->  revoke, so that every rank meets one  ->  shrink  ->  agree that all have it

Open MPI has it where `mpirun --with-ft ulfm` was asked for; then one more rank that ends is an error of the
calls of the others, and not the end of the job. A rank that is frozen, or cut off, is lost as well once it
has been silent for as long as the detector waits (`FLAGS`). Those of this node are then ended for good: one
that wakes up again must not write into the run's folder beside those that went on.

No import of mpi4py: the module comes as an argument, communicators are its own.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mpipipe.cluster.comm import RankLost
from mpipipe.errors import LaunchError

if TYPE_CHECKING:
    from mpipipe.cluster.comm import Communicator

F = TypeVar("F", bound=Callable[..., Any])
ENABLED = "OMPI_MCA_mpi_ft_enable"  # what --with-ft ulfm sets
FLAGS = (
    "--with-ft ulfm --mca mpi_ft_detector true --mca mpi_ft_detector_thread true "
    "--mca mpi_ft_detector_period 0.5 --mca mpi_ft_detector_timeout 2 "
    "--mca mpi_ft_propagator_with_rbcast true"
)
HANDLERS = 255  # what is done with a message, by its kind, in Open MPI 5.0


class _Handler(ctypes.Structure):
    _fields_ = (("call", ctypes.c_void_p), ("data", ctypes.c_void_p))


def tolerant(environ: Mapping[str, str]) -> bool:
    """Whether this process was started so that it outlives other ranks."""
    return environ.get(ENABLED, "0").lower() in ("1", "true", "yes")


def drop_early_messages() -> None:
    """So that no rank crashes as it starts: to be called before MPI_Init, with the MPI library loaded.

    A rank of Open MPI 5.0 that leaves the last fence of MPI_Init sends a heartbeat at once, while one that
    is still within the fence does not know yet what to do with it, and jumps to address 0. Until it knows,
    messages are dropped: the detector waits longer for the first heartbeat. Other libraries are left alone.
    """
    try:
        library = ctypes.CDLL("libopen-pal.so.80", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        handlers = (_Handler * HANDLERS).in_dll(library, "mca_btl_base_active_message_trigger")
    except (OSError, ValueError):
        return
    nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
    for handler in handlers:
        handler.call = handler.call or nothing.value


def check_tolerant(comm: Communicator) -> None:
    """Raises LaunchError, with the flags, where the loss of a rank would be the end of all."""
    if comm.size > 1 and not comm.notices_loss:
        raise LaunchError(
            "run.recover = mpi: this MPI was not started so that ranks outlive one another\n"
            f"  fix: with Open MPI 5, mpirun {FLAGS} ...; on any other, run.recover=restart"
        )


def is_loss(mpi: Any, error: Exception) -> bool:
    """Whether an error of MPI says that a rank was lost."""
    names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED", "ERR_IN_STATUS")
    code = getattr(error, "Get_error_class", int)()
    return code in {getattr(mpi, name, mpi.ERR_UNKNOWN) for name in names} - {mpi.ERR_UNKNOWN}


def noticing(call: F) -> F:
    """A method of a communicator that raises RankLost where MPI says so. For those with `_translated`."""

    @functools.wraps(call)
    def wrapped(self: Any, *args: Any, **how: Any) -> Any:
        try:
            return call(self, *args, **how)
        except Exception as error:
            if (said := self._translated(error)) is error:
                raise
            raise said from error

    return wrapped  # type: ignore[return-value]


def translated(mpi: Any, tolerates: bool, error: Exception) -> Exception:
    """The error to raise for one of MPI's."""
    return RankLost(f"a rank was lost: {error}") if tolerates and is_loss(mpi, error) else error


def shrink(mpi: Any, old: Any, others: Iterable[Any]) -> tuple[Any, Any, list[int]]:
    """Two communicators of the ranks that are left, and which of the old ones they are. Collective over them.

    others: what else the ranks may wait on. A rank may be lost on the way: then all begin again, which the
    agreement makes sure of.
    """
    for comm in (old, *others):
        comm.Revoke()
    while True:
        left = old.Shrink()
        left.Set_errhandler(mpi.ERRORS_RETURN)
        second: Any = None
        whole = 0
        with suppress(mpi.Exception):
            second = left.Dup()
            second.Set_errhandler(mpi.ERRORS_RETURN)
            whole = 1
        if not whole:
            left.Revoke()
        with suppress(mpi.Exception):
            whole &= left.Agree(whole)
            if whole and second is not None:
                before, now = old.Get_group(), left.Get_group()
                return left, second, mpi.Group.Translate_ranks(now, range(left.size), before)
        for made in (left, second):
            if made is not None:
                made.Revoke()


def divide(mpi: Any, whole: Any, ranks: Sequence[int]) -> tuple[Any, Any] | None:
    """Two communicators of some ranks, in this order; None on the others. Collective over all.

    Where a rank is lost on the way there is an error on every rank: none is left with what others lack.
    """
    mine = whole.rank in ranks
    colour, key = (0, ranks.index(whole.rank)) if mine else (mpi.UNDEFINED, 0)
    first = _agreed(mpi, whole, (), lambda: whole.Split(colour, key))
    second = _agreed(mpi, whole, (first,) if mine else (), lambda: first.Dup() if mine else None)
    if not mine:
        return None
    for made in (first, second):
        made.Set_errhandler(mpi.ERRORS_RETURN)
    return first, second


def _agreed(mpi: Any, whole: Any, others: Iterable[Any], make: Callable[[], Any]) -> Any:
    """What `make` gives, if it has given it on every rank. others: what else it waits on."""
    made, sound = None, 1
    try:
        made = make()
    except mpi.Exception:
        sound = 0
        for comm in (whole, *others):  # so that nobody waits there for this rank
            comm.Revoke()
    if not whole.Agree(sound):
        raise RankLost("a rank was lost while the ranks were divided")
    return made


def end_frozen(pids: Iterable[int]) -> None:
    """Ends lost ranks of this node that still are there. Only processes of this launcher, whose children all
    ranks of a node are: the number of one that has ended may be another's by now."""
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
            if int(stat.rpartition(")")[2].split()[1]) == os.getppid():
                os.kill(pid, signal.SIGKILL)
