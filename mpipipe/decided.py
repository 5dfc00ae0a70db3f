"""What "auto" means is decided once: by the plan or the checkpoint that a run is given, if it has one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mpipipe.checks import check_counts
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.launch import default_threads
from mpipipe.cluster.node import cores_available
from mpipipe.errors import PlanError
from mpipipe.planner.copies import even_blocks
from mpipipe.planner.given import check_given, check_ranks
from mpipipe.planner.sizes import counted
from mpipipe.report.plan_file import read_plan
from mpipipe.runtime.setting import numerics_of
from mpipipe.state.checkpoint import Reader
from mpipipe.state.resume import RunState, check_data, check_graph, check_numerics, read_state
from mpipipe.values import Gemm, Graph, Numerics, Plan


@dataclass(frozen=True)
class Before:
    """What a run is given to go on from: a checkpoint, a plan, both or neither."""

    folder: Path | None  # of the checkpoint
    saved: RunState | None  # what it says
    plan: Plan | None
    plan_name: str  # for messages
    new_numerics: bool  # those of the checkpoint need not be kept

    @classmethod
    def given(
        cls, comm: Communicator, resume: str | Path | None, plan: str | Path | Plan | None, new_numerics: bool
    ) -> Before:
        """As `Pipeline` is given them; the folder is the same on all ranks, though a link to it may move
        meanwhile. Collective."""
        folder = None
        if resume is not None:
            folder = comm.bcast_object(Path(resume).resolve() if comm.rank == 0 else Path())
        saved = None if folder is None else read_state(folder)
        if plan is None or isinstance(plan, Plan):
            return cls(folder, saved, plan, "the plan", new_numerics)
        return cls(folder, saved, read_plan(plan), str(plan), new_numerics)

    @property
    def numerics(self) -> Numerics | None:
        """What was decided: a checkpoint says it before a plan does."""
        found = self.saved or self.plan
        return None if found is None else found.numerics

    @cached_property
    def weights(self) -> Reader | None:
        return None if self.folder is None else Reader(self.folder, "model")

    def check_numerics(self, numerics: Numerics) -> None:
        """Raises ConfigError where the checkpoint has others."""
        if self.saved is not None and not self.new_numerics:
            check_numerics(self.saved.numerics, numerics, self.saved.version)

    def check_data(self, data: dict[str, Any]) -> None:
        """data: as in `RunState`. Raises CheckpointError where the checkpoint was trained on others."""
        if self.folder is not None and self.saved is not None and not self.new_numerics:
            check_data(self.folder, self.saved.data, data)

    def check_ranks(self, n_ranks: int) -> None:
        """Raises PlanError where the plan is for others."""
        if self.plan is not None:
            check_ranks(self.plan.layout, n_ranks, self.plan_name)

    def check_graph(self, graph: Graph, numerics: Numerics, n_ranks: int) -> list[str]:
        """Notes for people. Raises CheckpointError or PlanError where one is of another model or run."""
        notes = []
        if self.folder is not None and self.saved is not None and not self.new_numerics:
            check_graph(self.folder, self.saved.graph, graph.hash)
            if numerics.kernels and not self.saved.numerics.kernels:
                notes.append(
                    "the checkpoint is older than the record of which bits kernels give (now "
                    f"{numerics.kernels!r}); where those of the mpipipe that wrote it, {self.saved.version}, "
                    "added in another order, the bits of this run are others from here on"
                )
        if self.plan is not None:
            notes += check_given(self.plan, numerics, n_ranks, graph.groups, self.plan_name)
        return notes


@dataclass(frozen=True)
class Decided:
    """numerics: as far as they are known; count: of micro-batches, None: searched; gemm, op_table: None:
    measured; blocks_why, gemm_why: for people, as of `blocks_of` and `gemm_of`."""

    numerics: Numerics
    count: int | None
    gemm: Gemm | None
    op_table: dict[str, str] | None
    blocks_why: str
    gemm_why: str


def decide(
    comm: Communicator, before: Before, *, batch: int, micro_batches: int | Literal["auto"],
    blocks: int | Literal["auto"], max_ranks: int | None, threads: int | Literal["auto"], spares: int,
    gemm: Literal["auto"] | Gemm, bits: Literal["torch", "fast"], reduce: Literal["exact", "fast"],
    **settings: Any,
) -> Decided:  # fmt: skip
    """What decides the bits, before there is a model. Arguments as of `Pipeline`; settings: the other fields
    of `Numerics`. Collective. Raises MpipipeError where they do not fit each other, or the checkpoint."""
    known, new = before.numerics, before.new_numerics
    n_blocks, why = blocks_of(blocks, micro_batches, batch, comm.size, max_ranks, known, reduce, new, spares)
    check_counts(batch, micro_batches, n_blocks, reduce)
    count = micro_batches_of(micro_batches, batch, n_blocks, known, new)
    table, (route, route_why) = op_table_of(bits, known, new), gemm_of(gemm, known)
    numerics = numerics_of(
        bits=bits, op_table=table, batch=batch, micro_batches=count or n_blocks, blocks=n_blocks,
        threads=threads_of(comm, threads, before.saved, spares), gemm=route or "mkl", reduce=reduce,
        **settings,
    )  # fmt: skip
    before.check_numerics(numerics)
    return Decided(numerics, count, route, table, why, route_why)


def threads_of(
    comm: Communicator, threads: int | Literal["auto"], saved: RunState | None, spares: int = 0
) -> int:
    """What "auto" means is decided once: a resumed run keeps it, on any machine. Collective."""
    if threads != "auto":
        return threads
    return default_threads(comm, cores_available(), spares) if saved is None else saved.numerics.threads


def gemm_of(asked: Literal["auto"] | Gemm, decided: Numerics | None) -> tuple[Gemm | None, str]:
    """As `micro_batches_of`, and for people why. None: it is measured."""
    if asked != "auto":
        return asked, "as gemm (in a config kernels.gemm) says"
    return (None, "") if decided is None else (decided.gemm, "as the checkpoint or plan has it")


def op_table_of(bits: str, decided: Numerics | None, new_numerics: bool) -> dict[str, str] | None:
    """As `micro_batches_of`. None: it is measured."""
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
    max_ranks: int | None, decided: Numerics | None, reduce: Literal["exact", "fast"],
    new_numerics: bool = False, spares: int = 0,
) -> tuple[int, str]:  # fmt: skip
    """As `micro_batches_of`, and for people why; "" where it was given, or there are no blocks. n_ranks: that
    are there, with spares; max_ranks: that may come, None = no more; spares: of these, that do no work.
    Raises PlanError where more are there than may come."""
    if given != "auto":
        return given, ""
    if reduce == "fast":
        return 1, ""
    if decided is not None and not (new_numerics and max_ranks):
        return decided.blocks, "those of the checkpoint or plan, as they decide bits"
    if max_ranks is not None and max_ranks < n_ranks:
        raise PlanError(
            f"pipeline.max_ranks = {max_ranks}, and there are {n_ranks} ranks: set {n_ranks} at least, or "
            "leave it out"
        )
    most, count = (max_ranks or n_ranks) - spares, None if micro_batches == "auto" else micro_batches
    blocks = even_blocks(count, batch, most)
    who = "as pipeline.max_ranks says" if max_ranks else "those of the start"
    who += ", without spares" if spares else ""
    they = f"{count} micro-batches allow" if count else f"a batch of {batch} allows"
    few = f"; {they} no power of two times that"
    return blocks, f"for {counted(most, 'rank')} at most, {who}{few if 2 * blocks <= most else ''}"
