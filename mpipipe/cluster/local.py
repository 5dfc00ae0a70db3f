"""The in-process carrier: threads as ranks, the same contract as MPI, and stricter.

Nothing is buffered (a send completes when its receive is posted), tags end where MPI's may, and
a world in which every rank waits for another ends with DeadlockError instead of hanging. A rank that
raises Killed is lost, and who needs it notices at once, as under ULFM. All state is behind one lock: this
carrier is for tests and proofs, not for speed.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
    job = _Job()
    world = _World(job, node_of_rank or (0,) * size)
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = body(LocalCommunicator(world, rank))
        except Killed:
            world.lose(rank)
        except BaseException as error:  # whatever ends a rank must wake the others
            job.fail(rank, error)
        world.leave(rank)

    threads = [threading.Thread(target=run, args=(r,), name=f"rank-{r}") for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if job.failure:
        rank, error = job.failure
        if not isinstance(error, DeadlockError):
            error.add_note(f"raised on rank {rank} of {size}")
        raise error
    return [results[rank] for rank in sorted(results)]


@dataclass
class _Job:
    """What all worlds of one `run_local` have in common."""

    lock: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))
    failure: tuple[int, BaseException] | None = None

    def fail(self, rank: int, error: BaseException) -> None:
        with self.lock:
            self.failure = self.failure or (rank, error)
            self.lock.notify_all()


@dataclass(eq=False)
class _Message:
    """One side of a message: a request of its poster."""

    world: _World
    buf: Bytes
    peer: int
    what: str
    arrived: bool = False
    error: str = ""

    def done(self) -> bool:
        with self.world.lock:
            if self.error:
                raise RuntimeError(self.error)
            if not self.arrived:
                self.world.raise_if_failed({self.peer})
            return self.arrived


@dataclass
class _Round:
    """One collective call: what each rank brought, until all have taken the whole."""

    kind: str
    brought: dict[int, bytes] = field(default_factory=dict)
    taken: int = 0


class _World:
    def __init__(self, job: _Job, node_of_rank: tuple[int, ...]) -> None:
        self.size, self.node_of_rank = len(node_of_rank), node_of_rank
        self.job, self.lock = job, job.lock
        self.everyone = set(range(self.size))
        self.lost: set[int] = set()
        self._running = set(self.everyone)
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._sends: dict[tuple[int, int, int], deque[_Message]] = {}
        self._recvs: dict[tuple[int, int, int], deque[_Message]] = {}
        self._rounds: dict[int, _Round] = {}
        self._revoked = False
        self._left: set[int] = set()  # ranks that go on without the lost
        self.next: tuple[_World, list[int]] | None = None  # their world, and who they were here
        self._parts: dict[int, tuple[_World, list[int]]] = {}  # likewise, by the number of the call

    # -- the end -------------------------------------------------------------------------------

    def raise_if_failed(self, needed: set[int]) -> None:
        if self.job.failure:
            rank, error = self.job.failure
            raise PeerEnded(f"rank {rank} failed: {error!r}")
        if self._revoked:
            raise RankLost("a rank was lost, and others go on without it")
        if lost := self.lost & needed:
            raise RankLost(f"ranks {sorted(lost)} were lost")

    def _with_later(self, rank: int) -> Iterator[tuple[_World, int]]:
        """This world and those made of it, with the number that the rank has there."""
        yield self, rank
        for world, ranks in [*self._parts.values(), *([self.next] if self.next else [])]:
            if rank in ranks:
                yield from world._with_later(ranks.index(rank))

    def leave(self, rank: int) -> None:
        with self.lock:
            for world, number in self._with_later(rank):
                world._running.discard(number)
                world._check_deadlock()

    def lose(self, rank: int) -> None:
        with self.lock:
            for world, number in self._with_later(rank):
                world.lost.add(number)
                world._running.discard(number)
            self.lock.notify_all()

    def without_lost(self, rank: int) -> tuple[_World, list[int]]:
        """The world of those that are left, when all of them are here."""
        with self.lock:
            self._revoke()
            self._left.add(rank)
            self.lock.notify_all()
            self.lock.wait_for(lambda: self.next or self.job.failure or self._left >= self._running)
            if self.job.failure:
                self.raise_if_failed(set())
            if self.next is None:
                self.next = self._made(sorted(self._running))
                self.lock.notify_all()
            return self.next

    def _revoke(self) -> None:
        self._revoked = True
        for part, _ in self._parts.values():
            part._revoke()

    def part(self, number: int, ranks: list[int]) -> _World:
        """Of the `number`-th collective call."""
        with self.lock:
            if number not in self._parts:
                self._parts[number] = self._made(ranks)
            return self._parts[number][0]

    def _made(self, ranks: list[int]) -> tuple[_World, list[int]]:
        """A world of some of the ranks, of which some may be lost by now."""
        world = _World(self.job, number_nodes([self.node_of_rank[r] for r in ranks]))
        world.lost = {ranks.index(r) for r in self.lost if r in ranks}
        world._running -= world.lost
        return world, ranks

    def wait_for(self, rank: int, ready: Callable[[], bool], what: str, needed: set[int]) -> None:
        """Block this rank until `ready()`, which only the ranks `needed` can make true."""

        def over() -> bool:
            return ready() or self.job.failure is not None or self._revoked or bool(self.lost & needed)

        with self.lock:
            self._waiting[rank] = over, what
            self._check_deadlock()
            self.lock.wait_for(over)
            del self._waiting[rank]
            if not ready():
                self.raise_if_failed(needed)

    def _check_deadlock(self) -> None:
        blocked = [rank for rank in sorted(self._running) if rank in self._waiting]
        if not blocked or len(blocked) < len(self._running):
            return
        if not any(self._waiting[rank][0]() for rank in blocked):
            lines = [f"  rank {rank} waits for its {self._waiting[rank][1]}" for rank in blocked]
            self.job.fail(blocked[0], DeadlockError("every running rank waits:\n" + "\n".join(lines)))

    # -- messages ------------------------------------------------------------------------------

    def post(self, key: tuple[int, int, int], message: _Message, is_send: bool) -> None:
        """Match with the oldest post of the other side, or queue. `key`: sender, receiver, tag."""
        with self.lock:
            self.raise_if_failed({message.peer})
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
            self.raise_if_failed(self.everyone)
            call = self._rounds.setdefault(number, _Round(kind))
            if call.kind != kind:
                raise RuntimeError(f"collective {number}: rank {rank} calls {kind}, others {call.kind}")
            call.brought[rank] = item
            self.lock.notify_all()
            all_there = f"collective {kind}"
            self.wait_for(rank, lambda: len(call.brought) == self.size, all_there, self.everyone)
            call.taken += 1
            if call.taken == self.size:
                del self._rounds[number]
            return [call.brought[r] for r in range(self.size)]


class LocalCommunicator:
    """`Communicator` of one thread. Made by `run_local`."""

    def __init__(
        self, world: _World, rank: int, members: Sequence[int] = (), lost: tuple[int, ...] = ()
    ) -> None:
        self._world, self._calls, self.lost, self.notices_loss = world, 0, lost, True
        self.members = tuple(members) or tuple(range(world.size))
        self.successor: LocalCommunicator | None = None
        self.rank, self.size, self.node_of_rank = rank, world.size, world.node_of_rank
        self.tag_ub, self.helper_allowed, self.oversubscribed = ANY_TAG_UB, False, True
        self.clock_offset_s, self.transport = 0.0, ""

    def gone(self) -> tuple[int, ...]:
        with self._world.lock:
            return tuple(sorted(self.members[rank] for rank in self._world.lost))

    def end_gone(self) -> None:
        pass

    def survivors(self) -> LocalCommunicator:
        world, kept = self._world.without_lost(self.rank)
        members = [self.members[rank] for rank in kept]
        lost = tuple(sorted({*self.lost, *self.members} - {*members}))
        self.successor = LocalCommunicator(world, kept.index(self.rank), members, lost)
        return self.successor

    def part(self, ranks: Sequence[int]) -> LocalCommunicator | None:
        self._exchange("part", tuple(ranks))
        world = self._world.part(self._calls, list(ranks))
        if self.rank not in ranks:
            return None
        members = [self.members[rank] for rank in ranks]
        return LocalCommunicator(world, list(ranks).index(self.rank), members, self.lost)

    def isend(self, buf: Bytes, peer: int, tag: int, crossing: bool = False) -> Request:
        return self._post(buf, peer, tag, True)

    def irecv(self, buf: Bytes, peer: int, tag: int, crossing: bool = False) -> Request:
        return self._post(buf, peer, tag, False)

    def _post(self, buf: Bytes, peer: int, tag: int, is_send: bool) -> Request:
        check_buffer(buf, peer, self.size)
        if not 0 <= tag <= self.tag_ub:
            raise ValueError(f"tag {tag} is outside 0..{self.tag_ub}")
        what = f"{'send to' if is_send else 'receive from'} rank {peer} with tag {tag}"
        message = _Message(self._world, buf, peer, what)
        key = (self.rank, peer, tag) if is_send else (peer, self.rank, tag)
        self._world.post(key, message, is_send)
        return message

    def use_helper(self, on: bool) -> None:
        pass

    def use_parts(self, on: bool) -> None:
        pass

    def poll(self) -> None:
        pass

    def wait(self, *requests: Request) -> None:
        messages = [request for request in requests if isinstance(request, _Message)]
        what, peers = " or ".join(message.what for message in messages), {m.peer for m in messages}
        self._world.wait_for(self.rank, lambda: any(message.arrived for message in messages), what, peers)
        any(message.done() for message in messages)  # raises what went wrong

    def send_object(self, x: object, peer: int) -> None:
        data = np.frombuffer(pickle.dumps(x), np.uint8)
        for buf in (np.array([data.nbytes], np.int64).view(np.uint8), data):
            self.wait(self.isend(buf, peer, self.tag_ub))

    def recv_object(self, peer: int) -> Any:
        length = np.zeros(8, np.uint8)
        self.wait(self.irecv(length, peer, self.tag_ub))
        data = np.zeros(int(length.view(np.int64)[0]), np.uint8)
        self.wait(self.irecv(data, peer, self.tag_ub))
        return pickle.loads(data.tobytes())

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
            raise mismatch(kinds)
        return np.stack(arrays)

    def barrier(self) -> None:
        self._exchange("barrier", None)

    def abort(self, code: int) -> NoReturn:
        error = RuntimeError(f"rank {self.rank} aborted all ranks with exit code {code}")
        self._world.job.fail(self.rank, error)
        raise error

    def close(self) -> None:
        self.barrier()
