"""What all ranks write or sum up together, by parameter name. Collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from mpipipe.cluster.comm import Communicator
from mpipipe.state.checkpoint import save_shard, tensor_digest, weights_sha256, write_index


def save(comm: Communicator, folder: Path, tensors: Mapping[str, Tensor], order: Sequence[str]) -> None:
    """Each rank writes the tensors it owns; rank 0 writes the index when every shard is on disk.

    order: all names, canonical. Raises CheckpointError.
    """
    name = save_shard(folder, comm.rank, comm.size, tensors)
    mine = {key: (name, t.nbytes) for key, t in tensors.items()}
    where = {key: place for part in comm.allgather_object(mine) for key, place in part.items()}
    if comm.rank == 0:
        write_index(
            folder, {key: where[key][0] for key in order}, sum(nbytes for _, nbytes in where.values())
        )
    comm.barrier()


def weights_hash(comm: Communicator, tensors: Mapping[str, Tensor], order: Sequence[str]) -> str:
    """sha256 of all parameters and buffers in canonical order: equal bits, equal hash."""
    mine = {name: tensor_digest(name, t) for name, t in tensors.items()}
    digests = {name: d for part in comm.allgather_object(mine) for name, d in part.items()}
    return weights_sha256([digests[name] for name in order])
