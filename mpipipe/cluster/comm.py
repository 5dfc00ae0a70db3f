"""The door through which ranks talk: one contract, two carriers (`mpi.py`, `local.py`).

Invariants of both carriers
  1. A message is bytes: a one-dimensional contiguous uint8 array, as long on both sides.
  2. Matching is by (sender, receiver, tag), first posted first matched; nothing else orders messages.
  3. A buffer belongs to the carrier from the post until `done()` has returned True; the carrier
     keeps a reference, so dropping the request early frees nothing too soon.
  4. Collectives are called by all ranks in the same order, from one thread.
  5. Nobody may count on buffering: a send may complete only when its receive is posted.
  6. Where `notices_loss`, a call that needs a rank that is lost raises RankLost; and so does every call of
     every rank, once one of them calls `survivors`, which is all that may be called then.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Bytes = NDArray[np.uint8]
EAGER_BYTES = 60_000  # below Open MPI's limit over TCP, 64 KiB with a header; see `crossing.py`
ANY_TAG_UB = 32767  # every MPI allows at least these tags (MPI 4.1, 9.1.2)


class RankLost(RuntimeError):
    """A rank has ended, or was frozen or cut off: what was on its way is void. `Communicator.survivors`
    goes on without it."""


class Request(Protocol):
    """A message on its way. Ask it only from the thread that posted it."""

    def done(self) -> bool:
        """True once the buffer is free to use; never blocks, and moves messages on. May be asked
        again. RuntimeError when the message failed or the two sides disagree on its length (a
        message longer than its receive is only noticed as far as the MPI library notices)."""
        ...


class Communicator(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def node_of_rank(self) -> tuple[int, ...]:
        """By rank; nodes are numbered in the order of their lowest rank."""
        ...

    @property
    def tag_ub(self) -> int:
        """The largest tag."""
        ...

    @property
    def helper_allowed(self) -> bool:
        """A helper thread may move messages on while this rank computes. The same on all ranks."""
        ...

    @property
    def transport(self) -> str:
        """The library and those of its settings that say how messages move; empty within one process."""
        ...

    @property
    def oversubscribed(self) -> bool:
        """More ranks on this node than cores: `wait` then gives the core away."""
        ...

    @property
    def clock_offset_s(self) -> float:
        """time.perf_counter() here minus that of rank 0; subtract it to get rank 0's time. 0 on one node."""
        ...

    @property
    def members(self) -> tuple[int, ...]:
        """What its ranks were in the first world: names that they keep."""
        ...

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks of the first world that were lost before this one was made, ascending."""
        ...

    def gone(self) -> tuple[int, ...]:
        """Those of its `members` that are known to be lost by now, ascending; never blocks."""
        ...

    def end_gone(self) -> None:
        """Ends those of them that are on this node and still there, frozen: they must not wake up."""
        ...

    @property
    def notices_loss(self) -> bool:
        """The loss of a rank is an error here, RankLost, and not the end of all."""
        ...

    def survivors(self) -> Communicator:
        """After RankLost: the ranks that are left, in their order, as a world of their own. Collective over
        them; what still waits on this one, or on a part of it, raises RankLost."""
        ...

    def part(self, ranks: Sequence[int]) -> Communicator | None:
        """These ranks, in this order, as a world of their own, which the loss of another one does not
        disturb; None on the others. Collective over all. `survivors` is called on the whole."""
        ...

    @property
    def successor(self) -> Communicator | None:
        """What `survivors` has given."""
        ...

    def isend(self, buf: Bytes, peer: int, tag: int, crossing: bool = False) -> Request:
        """crossing, the same on both sides: others meet it on its way, so it goes in parts where `use_parts`
        says so."""
        ...

    def irecv(self, buf: Bytes, peer: int, tag: int, crossing: bool = False) -> Request: ...

    def use_helper(self, on: bool) -> None:
        """Whether the helper thread works, where one is allowed; it does until it is told not to."""
        ...

    def use_parts(self, on: bool) -> None:
        """Whether messages that cross between nodes go in parts of `EAGER_BYTES`, which wait for no answer;
        at first they do not. The same on all ranks, while no message is on its way. A part of this world,
        and the survivors, keep it."""
        ...

    def poll(self) -> None:
        """Moves messages on, where no helper does; never blocks."""
        ...

    def wait(self, *requests: Request) -> None:
        """Return when one of them is `done()`; all other messages move on meanwhile."""
        ...

    def send_object(self, x: object, peer: int) -> None:
        """To one rank, which has begun to receive it when this returns (pickled)."""
        ...

    def recv_object(self, peer: int) -> Any:
        """What `send_object` sends from there; the wait for it may be long, and gives the core away."""
        ...

    def allgather_object(self, x: T) -> list[T]:
        """Every rank's object, in rank order (pickled: not for the hot path)."""
        ...

    def bcast_object(self, x: T, root: int = 0) -> T:
        """The object of `root`; what the others pass is ignored (pickled)."""
        ...

    def allgather_array(self, x: NDArray[Any]) -> NDArray[Any]:
        """Every rank's array, (size, *x.shape). RuntimeError on all ranks when shapes or dtypes differ."""
        ...

    def barrier(self) -> None: ...

    def abort(self, code: int) -> NoReturn:
        """End all ranks at once, with this exit code. For one that cannot go on while others wait."""
        ...

    def close(self) -> None:
        """Give back what was taken. Collective; not on the way out of an error (see `abort`)."""
        ...


def check_buffer(buf: Bytes, peer: int, size: int) -> None:
    """The part of the contract that MPI itself would not notice, or only as a crash."""
    if buf.dtype != np.uint8 or buf.ndim != 1 or not buf.flags.c_contiguous:
        raise ValueError(
            f"a message is a contiguous uint8 array (n,), not {buf.dtype} {buf.shape}; "
            "send array.reshape(-1).view(numpy.uint8)"
        )
    if not 0 <= peer < size:
        raise ValueError(f"no rank {peer} in a world of {size} ranks (0..{size - 1})")


def gathered(comm: Communicator, mine: Mapping[K, V]) -> dict[K, V]:
    """What all ranks have, in one; of a key that several have, the last one's. Collective (pickled)."""
    return {key: value for of_rank in comm.allgather_object(mine) for key, value in of_rank.items()}


def number_nodes(keys: Sequence[Hashable]) -> tuple[int, ...]:
    """Node index of each rank from a key per rank that is equal exactly on one node.

    >>> number_nodes(["b", "a", "b"])
    (0, 1, 0)
    """
    index: dict[Hashable, int] = {}
    return tuple(index.setdefault(key, len(index)) for key in keys)


def mismatch(by_rank: Sequence[str]) -> RuntimeError:
    """The error for a collective whose ranks do not fit: the first rank that differs, both values."""
    rank = next(r for r, x in enumerate(by_rank) if x != by_rank[0])
    return RuntimeError(
        f"allgather_array: rank {rank} has {by_rank[rank]}, rank 0 has {by_rank[0]}; "
        "all ranks must make the same collective call with arrays of one shape and dtype"
    )
