"""What "auto" means is decided once: by the plan or the checkpoint that a run is given, if it has one."""

from __future__ import annotations

from typing import Literal

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.launch import default_threads
from mpipipe.cluster.node import cores_available
from mpipipe.planner.copies import even_blocks
from mpipipe.state.resume import RunState
from mpipipe.values import Gemm, Numerics


def threads_of(
    comm: Communicator, threads: int | Literal["auto"], saved: RunState | None, spares: int = 0
) -> int:
    """What "auto" means is decided once: a resumed run keeps it, on any machine. Collective."""
    if threads != "auto":
        return threads
    return default_threads(comm, cores_available(), spares) if saved is None else saved.numerics.threads


def gemm_of(asked: Literal["auto"] | Gemm, decided: Numerics | None) -> Gemm | None:
    """As `micro_batches_of`. None: it is measured."""
    if asked != "auto":
        return asked
    return None if decided is None else decided.gemm


def op_table_of(bits: str, decided: Numerics | None, new_numerics: bool) -> dict[str, str] | None:
    """As `gemm_of`."""
    if bits == "torch":
        return {}
    return None if decided is None or new_numerics or decided.bits != bits else decided.op_table


def micro_batches_of(
    given: int | Literal["auto"], batch: int, blocks: int, decided: Numerics | None, new_numerics: bool
) -> int | None:
    """What "auto" means is decided once: a resumed run keeps it, and a plan has it. None: it is searched."""
    if given != "auto":
        return given
    if decided is None or (new_numerics and (decided.batch, decided.blocks) != (batch, blocks)):
        return None
    return min(decided.micro_batches, batch)


def blocks_of(
    given: int | Literal["auto"], micro_batches: int | Literal["auto"], batch: int, n_ranks: int,
    decided: Numerics | None, reduce: Literal["exact", "fast"],
) -> int:  # fmt: skip
    """As `micro_batches_of`."""
    if given != "auto":
        return given
    if reduce == "fast":
        return 1
    if decided is not None:
        return decided.blocks
    return even_blocks(None if micro_batches == "auto" else micro_batches, batch, n_ranks)
