"""Do all ranks hold the same plan, code and settings? Asked before the first message.

Ranks that differ would train without an error to different bits, or stop at a message of
another length. (The idea: PyOP2's check of source hashes.)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import mpipipe
from mpipipe.cluster.comm import Communicator
from mpipipe.errors import LaunchError, MpipipeError

MISSING = "(missing)"
SAME = "start all ranks from one environment, one copy of mpipipe, and the same arguments"
# They change how many threads really compute, or with which instructions, whatever torch is told.
_VARIABLES = (
    "OMP_THREAD_LIMIT", "OMP_DYNAMIC", "MKL_DYNAMIC", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE",
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
)  # fmt: skip
T = TypeVar("T")


def from_root(comm: Communicator, work: Callable[[], T]) -> T:
    """Rank 0's `work()`, on every rank. Collective. Raises the MpipipeError of rank 0 on every rank, so that
    none is left waiting where somebody catches it."""
    done: list[T] = []
    failed = None
    if comm.rank == 0:
        try:
            done.append(work())
        except MpipipeError as error:
            failed = error
    done, failed = comm.bcast_object((done, failed))
    if failed is not None:
        raise failed
    return done[0]


def agree(comm: Communicator, facts: Mapping[str, str], fix: str = SAME) -> None:
    """Compare named facts (plan hash, code version, threads, torch, ...) over all ranks. Collective.

    Raises LaunchError on every rank, with one and the same message: the first rank that differs
    from rank 0, which fact, both values, and `fix`, the next move.
    """
    by_rank = comm.allgather_object(dict(facts))
    differing = [rank for rank, theirs in enumerate(by_rank) if theirs != by_rank[0]]
    if not differing:
        return
    rank, first = differing[0], by_rank[0]
    theirs = by_rank[rank]
    fact = next(k for k in [*first, *theirs] if first.get(k) != theirs.get(k))
    packages = comm.allgather_object(str(mpipipe.__path__[0]))
    two = f"  mpipipe of rank 0 is {packages[0]}, that of rank {rank} is {packages[rank]}\n"
    raise LaunchError(
        f"the ranks do not agree on: {fact} ({len(differing)} of {comm.size} ranks differ from rank 0)\n"
        f"  rank 0 (node {comm.node_of_rank[0]}): {first.get(fact, MISSING)}\n"
        f"  rank {rank} (node {comm.node_of_rank[rank]}): {theirs.get(fact, MISSING)}\n"
        f"{two if packages[rank] != packages[0] else ''}  fix: {fix}"
    )


def surroundings(extension: str = "") -> dict[str, str]:
    """The facts of a process that decide bits and that no argument tells: code, and variables of the
    environment. extension: version text of the compiled extension."""
    return {"code": code_version(extension), **variables()}


def variables() -> dict[str, str]:
    """Those of the environment that decide bits."""
    return {name: os.environ.get(name, "(not set)") for name in _VARIABLES}


def code_version(extension: str = "", rooms: Sequence[str] = (".",)) -> str:
    """sha256 (hex) over the package's Python sources, or those of some rooms, and the version text of the
    compiled extension."""
    h = hashlib.sha256(extension.encode())
    package = Path(mpipipe.__path__[0])
    for path in sorted({path for room in rooms for path in (package / room).rglob("*.py")}):
        source = path.read_bytes()
        h.update(f"\n{path.relative_to(package).as_posix()} {len(source)}\n".encode() + source)
    return h.hexdigest()
