"""What all ranks do together, or bring to one of them. Collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from mpipipe.cluster.comm import Bytes, Communicator
from mpipipe.errors import CheckpointError, MpipipeError
from mpipipe.graph.program import empty, spec

T = TypeVar("T")
Tensors = Mapping[str, Tensor]


def together(comm: Communicator, place: str, work: Callable[[], T]) -> list[T]:
    """Every rank's `work()`, in rank order; the work itself sends nothing. Collective.

    Raises CheckpointError on all ranks when it failed on one: none is left waiting.
    """
    done: list[T] = []
    reason = ""
    try:
        done.append(work())
    except Exception as error:
        reason = in_words(error)
    by_rank = comm.allgather_object((done, reason))
    raise_failures(place, [why for _, why in by_rank])
    return [result for results, _ in by_rank for result in results]


def in_words(error: Exception) -> str:
    return str(error) if isinstance(error, MpipipeError) else repr(error)


def raise_failures(place: str, reasons: Sequence[str]) -> None:
    """reasons: by rank, empty where nothing has failed. Raises CheckpointError with those that have."""
    failed = [f"  rank {rank}: {why}" for rank, why in enumerate(reasons) if why]
    if failed and len(reasons) == 1:
        raise CheckpointError(reasons[0])
    if failed:
        lines = "\n".join(failed)
        raise CheckpointError(f"{place}: failed on {len(failed)} of {len(reasons)} ranks\n{lines}")


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
