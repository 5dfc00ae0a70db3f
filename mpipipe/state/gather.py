"""What all ranks do together, or bring to one of them. Collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from mpipipe.cluster.comm import Bytes, Communicator
from mpipipe.errors import CheckpointError, MpipipeError
from mpipipe.graph.program import empty, spec
from mpipipe.state.files import kind_of

T = TypeVar("T")
Tensors = Mapping[str, Tensor]


class Failure(NamedTuple):
    """Of one rank. kind: as of MpipipeError."""

    why: str
    kind: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        return cls(str(error) if isinstance(error, MpipipeError) else repr(error), kind_of(error))


def together(comm: Communicator, place: str, work: Callable[[], T]) -> list[T]:
    """Every rank's `work()`, in rank order; the work itself sends nothing. Collective.

    Raises CheckpointError on all ranks when it failed on one: none is left waiting.
    """
    done: list[T] = []
    failure = None
    try:
        done.append(work())
    except Exception as error:
        failure = Failure.of(error)
    by_rank = comm.allgather_object((done, failure))
    raise_failures(place, [failure for _, failure in by_rank])
    return [result for results, _ in by_rank for result in results]


def raise_failures(place: str, by_rank: Sequence[Failure | None]) -> None:
    """by_rank: None where nothing has failed. Raises CheckpointError with those that have; another start may
    mend it where it may mend each."""
    failed = [(rank, failure) for rank, failure in enumerate(by_rank) if failure]
    if not failed:
        return
    text = f"{place}: failed on {len(failed)} of {len(by_rank)} ranks\n"
    text += "\n".join(f"  rank {rank}: {failure.why}" for rank, failure in failed)
    kind = "failed" if all(failure.kind == "failed" for _, failure in failed) else "error"
    raise CheckpointError(failed[0][1].why if len(by_rank) == 1 else text, kind=kind)


def collect(comm: Communicator, tensors: Tensors, order: Sequence[str]) -> dict[str, Tensor]:
    """Copies of all the tensors called `order`, on rank 0 in main memory; empty on the others. Collective.

    One tensor is on its way at a time, from the lowest rank that holds it: no rank but 0 needs memory.
    Raises CheckpointError on every rank for a name that none holds.
    """
    held = comm.allgather_object({name: spec(t) for name, t in tensors.items()})
    owner = {name: rank for rank in reversed(range(comm.size)) for name in held[rank]}
    if missing := [name for name in order if name not in owner]:
        raise CheckpointError(f"'{missing[0]}' is held by no rank ({len(missing)} such names)")
    found: dict[str, Tensor] = {}
    for name in order:
        if comm.rank == 0:
            found[name] = empty(held[owner[name]][name])
            if owner[name] == 0:
                found[name].copy_(tensors[name].detach())
            else:
                comm.wait(comm.irecv(_bytes(found[name]), owner[name], 0))
        elif comm.rank == owner[name]:
            comm.wait(comm.isend(_bytes(tensors[name].detach().cpu()), 0, 0))
    return found


def _bytes(tensor: Tensor) -> Bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()
