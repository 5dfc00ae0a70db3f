"""Copies of what every rank holds, in the memory of two ranks: what a run goes on from when a rank is lost.

    after step v     own snapshot -> partner (on another node where there is one), while step v + 1 runs
    after step v+1   sent and arrived -> barrier: every rank has version v

Invariants
  1. There are two versions, and the older one is overwritten only after the barrier of the newer one. So from
     the first barrier on there always is a version that is whole everywhere, `every` steps old at most.
  2. A version is whole on a rank when its own snapshot and the one that it keeps for another are there. One
     that is whole for each of the `members`, on whichever of two ranks, can be gone on from.
  3. Tensors are keyed by name, numbers too: any layout takes them up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpipipe.cluster.comm import Communicator, Request
from mpipipe.cluster.memory import trim_heap
from mpipipe.graph.program import empty, spec
from mpipipe.planner.mirrors import VERSIONS, partner_shift
from mpipipe.runtime.transport import as_bytes
from mpipipe.state.snapshot import Snapshot, needed_bytes, views
from mpipipe.values import TensorSpec

PORTIONS = 16  # of what is let go: after each of them the system gets its memory back
Specs = Mapping[str, TensorSpec]
Numbers = Sequence[tuple[str, Mapping[str, Any]]]  # of the optimizer of each stage: its kind, its numbers


class Facts(NamedTuple):
    """What one rank says of its snapshot."""

    specs: Specs
    numbers: Numbers


class Key(NamedTuple):
    """Which version of which mirrors. members: the ranks that made it, by their first numbers; plan: the hash
    of the one by which it is shared out among them."""

    step: int
    members: tuple[int, ...]
    plan: str


@dataclass
class _Version:
    step: int = -1  # not whole
    own: Snapshot = field(default_factory=Snapshot)
    other: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    facts: list[Facts] = field(default_factory=list)  # of every rank


class Mirrors:
    """Of one rank, in one world of ranks and under one plan, that of this hash. every: steps."""

    def __init__(self, comm: Communicator, every: int, plan: str) -> None:
        self._comm, self.every, self.members, self._plan = comm, every, comm.members, plan
        shift = partner_shift(comm.node_of_rank)
        self._to, self._of = (comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size
        self._versions = [_Version() for _ in range(VERSIONS)]
        self._pending: tuple[_Version, int, list[Request]] | None = None

    def take(self, step: int, tensors: Mapping[str, Tensor], numbers: Numbers) -> None:
        """Begins a version: what is copied may change from here on. Collective; after `commit`."""
        comm, version = self._comm, min(self._versions, key=lambda v: v.step)
        version.step = -1
        version.facts = comm.allgather_object(Facts({n: spec(t) for n, t in tensors.items()}, numbers))
        version.own.take(tensors)
        if (nbytes := needed_bytes(version.facts[self._of].specs)) != version.other.numel():
            version.other = torch.empty(nbytes, dtype=torch.uint8)
        sent = version.own.buffer[: needed_bytes(version.facts[comm.rank].specs)]
        requests = [
            comm.irecv(as_bytes(version.other), self._of, comm.tag_ub),
            comm.isend(as_bytes(sent), self._to, comm.tag_ub),
        ]
        self._pending = version, step, requests

    def commit(self) -> None:
        """Waits until all ranks have the version that was begun, if there is one. Collective."""
        if self._pending is None:
            return
        version, step, requests = self._pending
        for request in requests:
            self._comm.wait(request)
        version.step, self._pending = step, None
        self._comm.barrier()

    # -- when a rank was lost ------------------------------------------------------------------

    def whole(self) -> dict[Key, tuple[int, int]]:
        """The versions that are whole here, each with the ranks, by their first numbers, that it is of."""
        holds = self.members[self._comm.rank], self.members[self._of]
        return {Key(v.step, self.members, self._plan): holds for v in self._versions if v.step >= 0}

    def facts(self, step: int) -> list[Facts]:
        return self._version(step).facts

    def held(self, step: int) -> dict[str, Tensor]:
        """All the tensors of that version that are here, by name."""
        version = self._version(step)
        return views(version.other, version.facts[self._of].specs) | version.own.views

    def keep_only(self, step: int) -> None:
        """Gives the memory of the other versions back."""
        self._versions = [v if v.step == step else _Version() for v in self._versions]

    def _version(self, step: int) -> _Version:
        return next(v for v in self._versions if v.step == step)


@dataclass(frozen=True)
class Found:
    """A version that can be gone on from, the same on every rank. where: name of a tensor -> the ranks, of
    those that are left, that hold it."""

    key: Key
    where: Mapping[str, Sequence[int]]
    specs: Specs
    numbers: Numbers


def newest_whole(comm: Communicator, kept: Sequence[Mirrors]) -> Found | None:
    """The newest version that the ranks that are left hold together; None where a rank was lost with its
    partner, or before the first one. Collective. kept: by this rank."""
    mine = {key: holds for mirrors in kept for key, holds in mirrors.whole().items()}
    by_rank = comm.allgather_object(mine)
    wholes = [
        key
        for key in {key for offers in by_rank for key in offers}
        if {name for offers in by_rank for name in offers.get(key, ())} >= set(key.members)
    ]
    if not wholes:
        return None
    key = max(wholes, key=lambda key: (key.step, -len(key.members), key.plan))
    first = next(rank for rank, offers in enumerate(by_rank) if key in offers)
    own = next((m for m in kept if key in m.whole()), None)
    facts: list[Facts] = comm.bcast_object(own.facts(key.step) if own and comm.rank == first else [], first)
    holders = ((rank, member) for rank, offers in enumerate(by_rank) for member in offers.get(key, ()))
    return _found(key, holders, facts)


class Received:
    """Tensors of a version, by name: first values of a model and saved state of an optimizer. once: from now
    on each is read once, and let go then."""

    def __init__(self, step: int, tensors: dict[str, Tensor]) -> None:
        self.folder = Path(f"the mirrors of step {step}")  # of messages
        self._tensors, self._freed_bytes, self.once = tensors, 0, False
        self._most_bytes = sum(t.nbytes for t in tensors.values()) // PORTIONS
        self.names: Collection[str] = frozenset(tensors)

    def spec(self, name: str) -> TensorSpec:
        return spec(self._tensors[name])

    @torch.no_grad()
    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self._tensors[name])
        if self.once:
            self.let_go([name])

    def let_go(self, names: Iterable[str]) -> None:
        """Of what nobody reads any more."""
        for name in names:
            if name in self._tensors:
                self._freed_bytes += self._tensors.pop(name).nbytes
        if self._freed_bytes > self._most_bytes:
            self._freed_bytes = 0
            trim_heap()


def apart(tensors: dict[str, Tensor]) -> None:
    """Into main memory, each into some of its own, so that it can be let go alone; buffer after buffer of
    those that many lie in, of which nobody else may hold a view."""
    by_buffer = dict[int, list[str]]()
    for name in tensors:
        by_buffer.setdefault(tensors[name].untyped_storage().data_ptr(), []).append(name)
    for names in by_buffer.values():
        tensors.update({name: tensors[name].detach().to("cpu", copy=True).contiguous() for name in names})


def held(kept: Sequence[Mirrors], found: Found) -> dict[str, Tensor]:
    """What this rank has of a version."""
    own = next((m for m in kept if found.key in m.whole()), None)
    return own.held(found.key.step) if own is not None else {}


def offered(
    comm: Communicator, step: int, plan: str, tensors: Mapping[str, Tensor], numbers: Numbers
) -> Found:
    """What the ranks hold after a step, itself, as long as nobody changes it. Collective."""
    facts = comm.allgather_object(Facts({n: spec(t) for n, t in tensors.items()}, numbers))
    return _found(Key(step, comm.members, plan), enumerate(comm.members), facts)


def _found(key: Key, holders: Iterable[tuple[int, int]], facts: Sequence[Facts]) -> Found:
    """holders: a rank, and the member whose snapshot it has. facts: of each member."""
    where: dict[str, list[int]] = {}
    for rank, member in holders:
        for name in facts[key.members.index(member)].specs:
            if rank not in where.setdefault(name, []):
                where[name].append(rank)
    specs = {name: s for fact in facts for name, s in fact.specs.items()}
    return Found(key, where, specs, [part for fact in facts for part in fact.numbers])


def fetch(comm: Communicator, here: Mapping[str, Tensor], found: Found, wanted: Collection[str]) -> Received:
    """The tensors `wanted` on this rank: those that are here as they are, the others by messages, each from
    the lowest rank that holds it. here: in main memory. Collective."""
    asked = comm.allgather_object([name for name in found.specs if name in wanted and name not in here])
    got = {name: t for name, t in here.items() if name in wanted}
    requests = []
    for name in asked[comm.rank]:
        got[name] = empty(found.specs[name])
        requests.append(comm.irecv(as_bytes(got[name]), found.where[name][0], 0))
    for rank, names in enumerate(asked):
        to_it = (name for name in names if found.where[name][0] == comm.rank)
        requests += [comm.isend(as_bytes(here[name]), rank, 0) for name in to_it]
    for request in requests:
        comm.wait(request)
    return Received(found.key.step, got)
