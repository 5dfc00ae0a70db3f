"""The in-process carrier: threads as ranks, the same contract as MPI, and stricter.

Nothing is buffered (a send completes when its receive is posted), tags end where MPI's may, and
a world in which every rank waits for another ends with DeadlockError instead of hanging. A rank that
raises Killed is lost, and the others notice at once. All state is behind one lock: this carrier is
for tests and proofs, not for speed.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpipipe.cluster.comm import (
    ANY_TAG_UB,
    Bytes,
    Communicator,
    RankLost,
    Request,
    check_buffer,
    members,
    mismatch,
    number_nodes,
)
from mpipipe.errors import DeadlockError

T = TypeVar("T")


class PeerEnded(RuntimeError):
    """Another rank failed first; `run_local` raises that rank's error instead of this one."""


class Killed(BaseException):
    """Raised by a rank's own body: it is lost, as by a signal."""


def run_local(
    size: int, body: Callable[[Communicator], T], node_of_rank: tuple[int, ...] | None = None
) -> list[T]:
    """Run `body(communicator)` on `size` threads; their results in rank order, without those of the lost.

    When a rank raises, all others are woken and end, and its exception is raised here with a
    note naming the rank. `node_of_rank` pretends that the ranks are on several nodes.
    Raises DeadlockError when every rank that has not ended waits.
    """
    world = _World(size, node_of_rank or (0,) * size)
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = body(LocalCommunicator(world, rank))
        except Killed:
            world.lose(rank)
        except BaseException as error:  # whatever ends a rank must wake the others
            world.fail(rank, error)
        world.leave(rank)

    threads = [threading.Thread(target=run, args=(r,), name=f"rank-{r}") for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failure := world.any_failure():
        rank, error = failure
        if not isinstance(error, DeadlockError):
            error.add_note(f"raised on rank {rank} of {size}")
        raise error
    return [results[rank] for rank in sorted(results)]


@dataclass(eq=False)
class _Message:
    """One side of a message: a request of its poster."""

    world: _World
    buf: Bytes
    what: str
    arrived: bool = False
    error: str = ""

    def done(self) -> bool:
        with self.world.lock:
            self.world.raise_if_failed()
            if self.error:
                raise RuntimeError(self.error)
            return self.arrived


@dataclass
class _Round:
    """One collective call: what each rank brought, until all have taken the whole."""

    kind: str
    brought: dict[int, bytes] = field(default_factory=dict)
    taken: int = 0


class _World:
    def __init__(self, size: int, node_of_rank: tuple[int, ...]) -> None:
        self.size, self.node_of_rank = size, node_of_rank
        self.lock = threading.Condition(threading.RLock())
        self.failure: tuple[int, BaseException] | None = None
        self._running = set(range(size))
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._sends: dict[tuple[int, int, int], deque[_Message]] = {}
        self._recvs: dict[tuple[int, int, int], deque[_Message]] = {}
        self._rounds: dict[int, _Round] = {}
        self._lost: set[int] = set()
        self._left: set[int] = set()  # ranks that go on without the lost
        self.next: tuple[_World, list[int]] | None = None  # their world, and who they were here

    # -- the end -------------------------------------------------------------------------------

    def raise_if_failed(self) -> None:
        if self.failure:
            raise PeerEnded(f"rank {self.failure[0]} failed: {self.failure[1]!r}")
        if self._lost:
            raise RankLost(f"ranks {sorted(self._lost)} were lost")

    def any_failure(self) -> tuple[int, BaseException] | None:
        """Of this world or of one that came after it."""
        return self.failure or (self.next[0].any_failure() if self.next else None)

    def fail(self, rank: int, error: BaseException) -> None:
        with self.lock:
            if self.next and rank in self.next[1]:
                self.next[0].fail(self.next[1].index(rank), error)
            elif self.failure is None:
                self.failure = rank, error
            self.lock.notify_all()

    def leave(self, rank: int) -> None:
        with self.lock:
            if self.next and rank in self.next[1]:
                self.next[0].leave(self.next[1].index(rank))
            self._running.discard(rank)
            self._check_deadlock()

    def lose(self, rank: int) -> None:
        with self.lock:
            if self.next and rank in self.next[1]:
                self.next[0].lose(self.next[1].index(rank))
                return
            self._lost.add(rank)
            self._running.discard(rank)
            self.lock.notify_all()

    def without_lost(self, rank: int) -> tuple[_World, list[int]]:
        """The world of those that are left, when all of them are here."""
        with self.lock:
            self._left.add(rank)
            self.lock.notify_all()
            self.lock.wait_for(lambda: self.next or self.failure or self._left >= self._running)
            if self.failure:
                self.raise_if_failed()
            if self.next is None:
                kept = sorted(self._running)
                nodes = number_nodes([self.node_of_rank[r] for r in kept])
                self.next = _World(len(kept), nodes), kept
                self.lock.notify_all()
            return self.next

    def wait_for(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Block this rank until `ready()`, which only other ranks can make true."""
        with self.lock:
            self._waiting[rank] = ready, what
            self._check_deadlock()
            self.lock.wait_for(lambda: ready() or self.failure is not None or bool(self._lost))
            del self._waiting[rank]
            self.raise_if_failed()

    def _check_deadlock(self) -> None:
        blocked = [rank for rank in sorted(self._running) if rank in self._waiting]
        if self.failure or self._lost or not blocked or len(blocked) < len(self._running):
            return
        if not any(self._waiting[rank][0]() for rank in blocked):
            lines = [f"  rank {rank} waits for its {self._waiting[rank][1]}" for rank in blocked]
            self.fail(blocked[0], DeadlockError("every running rank waits:\n" + "\n".join(lines)))

    # -- messages ------------------------------------------------------------------------------

    def post(self, key: tuple[int, int, int], message: _Message, is_send: bool) -> None:
        """Match with the oldest post of the other side, or queue. `key`: sender, receiver, tag."""
        with self.lock:
            self.raise_if_failed()
            others, own = (self._recvs, self._sends) if is_send else (self._sends, self._recvs)
            if not others.get(key):
                own.setdefault(key, deque()).append(message)
                return
            other = others[key].popleft()
            sent, received = (message, other) if is_send else (other, message)
            if sent.buf.nbytes == received.buf.nbytes:
                received.buf[:] = sent.buf
            else:
                text = f"got {sent.buf.nbytes} bytes; the two ranks do not run the same plan"
                sent.error = received.error = f"{received.what} of {received.buf.nbytes} bytes {text}"
            sent.arrived = received.arrived = True
            self.lock.notify_all()

    # -- collectives ---------------------------------------------------------------------------

    def exchange(self, rank: int, number: int, kind: str, item: bytes) -> list[bytes]:
        """The `number`-th collective call of each rank: all bring an item, all take all."""
        with self.lock:
            self.raise_if_failed()
            call = self._rounds.setdefault(number, _Round(kind))
            if call.kind != kind:
                raise RuntimeError(f"collective {number}: rank {rank} calls {kind}, others {call.kind}")
            call.brought[rank] = item
            self.lock.notify_all()
            self.wait_for(rank, lambda: len(call.brought) == self.size, f"collective {kind}")
            call.taken += 1
            if call.taken == self.size:
                del self._rounds[number]
            return [call.brought[r] for r in range(self.size)]


class LocalCommunicator:
    """`Communicator` of one thread. Made by `run_local`."""

    def __init__(self, world: _World, rank: int, lost: tuple[int, ...] = ()) -> None:
        self._world, self._calls, self.lost, self.notices_loss = world, 0, lost, True
        self.successor: LocalCommunicator | None = None
        self.rank, self.size, self.node_of_rank = rank, world.size, world.node_of_rank
        self.tag_ub, self.helper_allowed, self.oversubscribed = ANY_TAG_UB, False, True
        self.clock_offset_s, self.transport = 0.0, ""

    def survivors(self) -> LocalCommunicator:
        world, kept = self._world.without_lost(self.rank)
        names = members(self)
        gone = (name for rank, name in enumerate(names) if rank not in kept)
        self.successor = LocalCommunicator(world, kept.index(self.rank), tuple(sorted((*self.lost, *gone))))
        return self.successor

    def isend(self, buf: Bytes, peer: int, tag: int) -> Request:
        return self._post(buf, peer, tag, True)

    def irecv(self, buf: Bytes, peer: int, tag: int) -> Request:
        return self._post(buf, peer, tag, False)

    def _post(self, buf: Bytes, peer: int, tag: int, is_send: bool) -> Request:
        check_buffer(buf, peer, self.size)
        if not 0 <= tag <= self.tag_ub:
            raise ValueError(f"tag {tag} is outside 0..{self.tag_ub}")
        what = f"{'send to' if is_send else 'receive from'} rank {peer} with tag {tag}"
        message = _Message(self._world, buf, what)
        key = (self.rank, peer, tag) if is_send else (peer, self.rank, tag)
        self._world.post(key, message, is_send)
        return message

    def use_helper(self, on: bool) -> None:
        pass

    def poll(self) -> None:
        pass

    def wait(self, request: Request) -> None:
        assert isinstance(request, _Message)
        self._world.wait_for(self.rank, lambda: request.arrived, request.what)
        request.done()  # raises what went wrong

    def _exchange(self, kind: str, x: T) -> list[T]:
        self._calls += 1
        items = self._world.exchange(self.rank, self._calls, kind, pickle.dumps(x))
        return [pickle.loads(item) for item in items]

    def allgather_object(self, x: T) -> list[T]:
        return self._exchange("allgather_object", x)

    def bcast_object(self, x: T, root: int = 0) -> T:
        mine = x if self.rank == root else None
        return self._exchange(f"bcast_object from {root}", mine)[root]  # type: ignore[return-value]

    def allgather_array(self, x: NDArray[Any]) -> NDArray[Any]:
        arrays = self._exchange("allgather_array", x)
        kinds = [f"{a.dtype.str}{a.shape}" for a in arrays]
        if len(set(kinds)) > 1:
            raise mismatch("allgather_array", kinds)
        return np.stack(arrays)

    def barrier(self) -> None:
        self._exchange("barrier", None)

    def abort(self, code: int) -> NoReturn:
        error = RuntimeError(f"rank {self.rank} aborted all ranks with exit code {code}")
        self._world.fail(self.rank, error)
        raise error

    def close(self) -> None:
        self.barrier()
