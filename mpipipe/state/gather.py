"""What all ranks write or sum up together, by parameter name. Collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from mpipipe.cluster.comm import Bytes, Communicator
from mpipipe.errors import CheckpointError, MpipipeError
from mpipipe.state.checkpoint import (
    Kind,
    Reader,
    index_name,
    save_shard,
    shard_name,
    tensor_digest,
    weights_sha256,
    write_index,
)
from mpipipe.state.files import write_text
from mpipipe.state.resume import RUN, RunState, discard, make_room
from mpipipe.values import to_json

T = TypeVar("T")
Tensors = Mapping[str, Tensor]


def save(
    comm: Communicator,
    folder: Path,
    model: Tensors,
    optimizer: Tensors,
    order: Sequence[str],
    facts: RunState,
) -> RunState:
    """Writes one checkpoint: each rank a shard of what it holds, rank 0 the indexes and run.json, last.

    model: parameters and buffers that this rank holds; optimizer: its state by "<parameter>/<state>",
    scalars as 0-d tensors; order: all names of the model, canonical. Of what several ranks hold the
    lowest one writes. Gives `facts` with sizes and weights_sha256 filled in, on every rank.

    Raises CheckpointError on every rank when one of them fails, with that rank and the reason; what was
    written is removed again, and checkpoints in other folders are as they were.
    """
    held = comm.allgather_object((list(model), list(optimizer)))
    weights = _Shards.of("model", [names for names, _ in held])
    states = _Shards.of("optimizer", [names for _, names in held])
    _check_names(list(weights.file_of), order)

    def write() -> tuple[_Written, _Written]:
        return weights.write(comm.rank, folder, model), states.write(comm.rank, folder, optimizer)

    def commit() -> RunState:
        if comm.rank != 0:
            return facts
        state_order = _by_parameter(states.file_of, order)
        sizes = weights.index(folder, order, [part for part, _ in parts])
        sizes |= states.index(folder, state_order, [part for _, part in parts])
        digests = {name: d for part, _ in parts for name, d in part.digests.items()}
        of_states = {name: d for _, part in parts for name, d in part.digests.items()}
        whole = replace(
            facts,
            sizes=sizes,
            weights_sha256=weights_sha256([digests[n] for n in order]),
            sha256=weights.sha256(order, digests) | states.sha256(state_order, of_states),
        )
        write_text(folder / RUN, to_json(whole))
        return whole

    together(comm, str(folder), lambda: make_room(folder) if comm.rank == 0 else None)
    try:
        parts = together(comm, str(folder), write)
        return together(comm, str(folder), commit)[0]
    except CheckpointError as error:
        if comm.rank == 0:
            discard(folder)
        raise CheckpointError(
            f"{error}\n  earlier checkpoints are as they were: make room, then go on with --resume"
        ) from error


def together(comm: Communicator, place: str, work: Callable[[], T]) -> list[T]:
    """Every rank's `work()`, in rank order; the work itself sends nothing. Collective.

    Raises CheckpointError on all ranks when it failed on one: none is left waiting.
    """
    done: list[T] = []
    reason = ""
    try:
        done.append(work())
    except Exception as error:
        reason = str(error) if isinstance(error, MpipipeError) else repr(error)
    by_rank = comm.allgather_object((done, reason))
    failed = [f"  rank {rank}: {why}" for rank, (_, why) in enumerate(by_rank) if why]
    if failed:
        if comm.size == 1:
            raise CheckpointError(reason)
        raise CheckpointError(f"{place}: failed on {len(failed)} of {comm.size} ranks\n" + "\n".join(failed))
    return [result for results, _ in by_rank for result in results]


@dataclass(frozen=True)
class _Written:
    """Of one kind, by one rank."""

    sizes: dict[str, int]  # file -> bytes
    nbytes: int  # of the tensors
    digests: dict[str, str]  # of the tensors


@dataclass(frozen=True)
class _Shards:
    """Which rank writes which tensors of one kind into which file; a rank with none writes no file."""

    kind: Kind
    files: dict[int, str]  # rank -> file
    file_of: dict[str, str]  # name -> file

    @classmethod
    def of(cls, kind: Kind, held: Sequence[Sequence[str]]) -> _Shards:
        """held: by rank, the names of its tensors; replicas hold the same ones."""
        first = {name: rank for rank in reversed(range(len(held))) for name in held[rank]}
        writers = sorted(set(first.values()))
        files = {rank: shard_name(i, len(writers), kind) for i, rank in enumerate(writers)}
        return cls(kind, files, {name: files[rank] for name, rank in first.items()})

    def write(self, rank: int, folder: Path, tensors: Tensors) -> _Written:
        if rank not in self.files:
            return _Written({}, 0, {})
        mine = {name: t for name, t in tensors.items() if self.file_of[name] == self.files[rank]}
        file = save_shard(folder, list(self.files).index(rank), len(self.files), mine, self.kind)
        digests = {name: tensor_digest(name, t) for name, t in mine.items()}
        return _Written({file: (folder / file).stat().st_size}, sum(t.nbytes for t in mine.values()), digests)

    def index(self, folder: Path, order: Sequence[str], parts: Sequence[_Written]) -> dict[str, int]:
        """Writes the index; the sizes of all files of this kind."""
        weight_map = {name: self.file_of[name] for name in order}
        write_index(folder, weight_map, sum(part.nbytes for part in parts), self.kind)
        file = index_name(self.kind)
        sizes = {file: size for part in parts for file, size in part.sizes.items()}
        return sizes | {file: (folder / file).stat().st_size}

    def sha256(self, order: Sequence[str], digests: Mapping[str, str]) -> dict[str, str]:
        """Of the tensors of each file, in their order."""
        return {
            file: weights_sha256([digests[name] for name in order if self.file_of[name] == file])
            for file in self.files.values()
        }


def _by_parameter(names: Mapping[str, str], order: Sequence[str]) -> list[str]:
    """Names of optimizer state in the order of their parameters; any others last."""
    place = {name: i for i, name in enumerate(order)}
    return sorted(names, key=lambda name: (place.get(name.rpartition("/")[0], len(place)), name))


def _check_names(found: Sequence[str], order: Sequence[str]) -> None:
    misfits = sorted(set(found) ^ set(order))
    if misfits:
        side = "held by no rank" if misfits[0] in order else "unknown to the model"
        raise CheckpointError(
            f"nothing saved: '{misfits[0]}' is {side} ({len(misfits)} such names); the ranks and the model "
            "must name the same parameters and buffers"
        )


def verify(comm: Communicator, reader: Reader, sha256: Mapping[str, str]) -> None:
    """Whether what the ranks have read are the bits that were saved. sha256: as in `RunState`. Collective.

    Raises CheckpointError on every rank, with the file and both values. What no rank has read is not checked.
    """
    read = {name: d for part in comm.allgather_object(reader.digests) for name, d in part.items()}
    for file, names in reader.files.items():
        if file not in sha256 or not read.keys() >= set(names):
            continue
        if (found := weights_sha256([read[name] for name in names])) != sha256[file]:
            raise reader.damaged(
                f"{reader.folder / file}: its tensors' sha256 is {found[:12]}, {RUN} says {sha256[file][:12]}"
            )


def collect(comm: Communicator, tensors: Tensors, order: Sequence[str]) -> dict[str, Tensor]:
    """Copies of all the tensors called `order`, on rank 0 in main memory; empty on the others. Collective.

    One tensor is on its way at a time, from the lowest rank that holds it: no rank but 0 needs memory.
    Raises CheckpointError on every rank for a name that none holds.
    """
    held = comm.allgather_object({n: (tuple(t.shape), t.dtype) for n, t in tensors.items()})
    owner = {name: rank for rank in reversed(range(comm.size)) for name in held[rank]}
    if missing := [name for name in order if name not in owner]:
        raise CheckpointError(f"'{missing[0]}' is held by no rank ({len(missing)} such names)")
    found: dict[str, Tensor] = {}
    for name in order:
        if comm.rank == 0:
            shape, dtype = held[owner[name]][name]
            found[name] = torch.empty(shape, dtype=dtype)
            if owner[name] == 0:
                found[name].copy_(tensors[name].detach())
            else:
                comm.wait(comm.irecv(_bytes(found[name]), owner[name], 0))
        elif comm.rank == owner[name]:
            comm.wait(comm.isend(_bytes(tensors[name].detach().cpu()), 0, 0))
    return found


def _bytes(tensor: Tensor) -> Bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()
