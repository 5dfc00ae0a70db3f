"""What tells that bits are the same: of a tensor, of the tensors of a model, of a file.

tensor   sha256 of its name, dtype, shape and bits, however they are cut into pieces
model    sha256 of its tensors' digests in canonical order: the same for every cut
shard    sha256 of its header and of its tensors' digests in their order there: every byte counts, and
         what several ranks or threads have read adds up to it
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mpipipe.graph.program import spec
from mpipipe.values import TensorSpec, digest

PIECE_BYTES = 8 << 20  # hashed, read or written at once: Python's lock is held between pieces only


def tensor_digest(name: str, tensor: Tensor) -> str:
    """sha256 of a tensor's name, dtype, shape and bits."""
    return pieces_digest(name, spec(tensor), pieces_of(tensor))


def pieces_digest(name: str, of: TensorSpec, pieces: Iterable[memoryview]) -> str:
    """As `tensor_digest`, of a tensor whose bytes come in pieces."""
    h = begun_digest(name, of)
    for piece in pieces:
        h.update(piece)
    return h.hexdigest()


def begun_digest(name: str, of: TensorSpec) -> hashlib._Hash:
    """To be updated with the bytes of the tensor."""
    return hashlib.sha256(f"{name} torch.{of.dtype} {tuple(of.shape)}\n".encode())


def pieces_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, in order; one in main memory that is contiguous is not copied."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return (flat[start : start + PIECE_BYTES] for start in range(0, len(flat), PIECE_BYTES))


def weights_sha256(digests: Sequence[str]) -> str:
    """One sha256 for the whole model, from its tensors' digests in canonical order: the same for
    every cut, so two runs with equal bits print equal lines."""
    return digest(*digests)


def shard_sha256(header: bytes, digests: Sequence[str]) -> str:
    """Of one file; digests: of its tensors, as they lie in it."""
    return digest(hashlib.sha256(header).hexdigest(), *digests)


def file_sha256(path: Path) -> str:
    """Of the bytes of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
