"""A checkpoint, written by all ranks at once while they train on.

    main thread      begin: names, a copy of what is held     poll, at each step: is everybody done?
                       |                                        ^
    writer thread      '-> shards of this rank -> rank-k.json --|     each file whole, or not at all
    of rank 0                 the files of all ranks are seen -> indexes -> run.json -> older ones go

Only the main thread talks to other ranks. What the writers have to say to that of rank 0 lies in the folder:
so a checkpoint whose shards are all on disk becomes whole also while a long step is computed, or where a rank
has failed meanwhile. No process is forked beside MPI, and no file is locked; a file system that shows new
files late (NFS: up to a minute) delays the manifest, not the training.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from torch import Tensor

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.shared import look_anew
from mpipipe.errors import CheckpointError
from mpipipe.graph.program import spec
from mpipipe.state.checkpoint import Kind
from mpipipe.state.gather import Failure, raise_failures, together
from mpipipe.state.parts import Beside, Heard, Held, Save, Shards
from mpipipe.state.resume import RUN, RunState, damage, discard, make_room, read_state
from mpipipe.state.snapshot import Snapshot, needed_bytes

SETTLE_S = 30.0  # for a save that is under way when a rank fails
_LOOK_S = 0.1  # between two looks whether everybody is done


class Saver:
    """The checkpoints of one run on one rank, one at a time. Collective, but for `settle`.

    saved: the last one that became whole, the same on every rank; took_s: the longest save, until all ranks
    knew that it was whole.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.saved: RunState | None = None
        self.took_s = 0.0
        self._snapshot = Snapshot()
        self._writer: _Writer | None = None

    @property
    def under_way(self) -> bool:
        """Whether ranks still write, or do not know yet that all have done."""
        return self._writer is not None

    def copied_bytes(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> tuple[int, ...]:
        """By rank, of the copy of what it writes in the background. Arguments: as of `save`. Collective."""
        held: Held = {"model": model, "optimizer": optimizer}
        shards, _ = self._shards(held)
        mine = _flat({kind: of.mine(self.comm.rank, held[kind]) for kind, of in shards.items()})
        return tuple(self.comm.allgather_object(needed_bytes({name: spec(t) for name, t in mine.items()})))

    def let_go(self) -> None:
        """Gives the memory of the copies back; after `finish`."""
        self._snapshot = Snapshot()

    def reserve(self, nbytes: int) -> None:
        """Memory for the copies, so that the first `begin` need not wait for it."""
        self._snapshot = Snapshot(nbytes)

    def save(
        self, folder: Path, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor],
        order: Sequence[str], facts: RunState, beside: Beside = lambda folder: (),
        then: Callable[[], object] = lambda: None, background: bool = False,
    ) -> None:  # fmt: skip
        """Writes a checkpoint: each rank a shard of what it holds, rank 0 the indexes and run.json, last.

        model: parameters and buffers that this rank holds; optimizer: its state by "<parameter>/<state>",
        scalars as 0-d tensors; order: all names of the model, canonical; facts: but for what the files are.
        Of what several ranks hold one writes. beside, then: what a thread of rank 0 does before run.json and
        after it. background: waits only for the save before and for a copy in memory.

        Raises CheckpointError on every rank when one of them fails, with that rank and the reason; what was
        written is removed again, and checkpoints in other folders are as they were.
        """
        self.finish()
        held: Held = {"model": model, "optimizer": optimizer}
        shards, name = self._shards(held)
        _check_names(list(shards["model"].file_of), order)
        together(self.comm, str(folder), lambda: make_room(folder) if self.comm.rank == 0 else None)
        job = Save(name, folder, order, shards, facts)
        mine = job.mine(self.comm.rank, held)
        if background:
            self._snapshot.take(_flat(mine))
            copies = self._snapshot.views
            mine = {k: {name: copies[f"{k}/{name}"] for name in named} for k, named in mine.items()}
        self._writer = _Writer(job, self.comm.rank, mine, beside, then)
        self._writer.start()
        if not background:
            self.finish()

    def _shards(self, held: Held) -> tuple[dict[Kind, Shards], str]:
        """Who writes what, and the name of a save."""
        sizes = {kind: {name: t.nbytes for name, t in named.items()} for kind, named in held.items()}
        of_ranks = self.comm.allgather_object((sizes, uuid4().hex))
        return {k: Shards.of(k, [by_kind[k] for by_kind, _ in of_ranks]) for k in held}, of_ranks[0][1]

    def take(self, folder: Path, facts: RunState, then: Callable[[], object] = lambda: None) -> bool:
        """Whether the folder holds this checkpoint as a whole already, which was written before its step was
        done again, with the same bits; then it is the last one saved. Arguments, errors: as of `save`."""
        self.finish()

        def there() -> RunState | None:
            if self.comm.rank != 0 or damage(folder):
                return None
            found = read_state(folder)
            if (found.step, found.numerics, found.graph) != (facts.step, facts.numerics, facts.graph):
                return None
            then()
            return found

        found = together(self.comm, str(folder), there)[0]
        self.saved = found or self.saved
        return found is not None

    def poll(self, wait_s: float = 0.0) -> None:
        """Between two steps: whether the save under way, if there is one, has become whole, or has failed.
        Raises CheckpointError on every rank, as `save`."""
        if (writer := self._writer) is None:
            return
        writer.join(wait_s)
        by_rank = self.comm.allgather_object(writer.said())
        if any(failure for _, failure in by_rank):
            self._give_up(writer, [failure for _, failure in by_rank])
        done = [done for done, _ in by_rank]
        if all(done[1:]):
            writer.heard.all_written.set()
        if all(done):
            self.saved, self._writer = self.comm.bcast_object(writer.whole), None
            self.took_s = max(self.took_s, time.perf_counter() - writer.began)

    def finish(self) -> None:
        """Waits for the save under way. Raises CheckpointError on every rank, as `save`."""
        while self.under_way:
            self.poll(_LOOK_S)

    def settle(self) -> None:
        """On the way out of an error, when the others may be lost: gives the save under way a while to become
        whole. Not collective, and raises nothing."""
        if (writer := self._writer) is None:
            return
        ends = time.monotonic() + SETTLE_S
        writer.heard.all_written.set()
        writer.join(SETTLE_S)
        while self.comm.rank != 0 and not writer.failure and time.monotonic() < ends:
            look_anew(writer.job.folder)
            if os.path.exists(writer.job.folder / RUN):  # `Path.exists` may raise
                return
            time.sleep(_LOOK_S)

    def abandon(self) -> Path | None:
        """Ends the save under way, whole or not, as a rank was lost; its folder. Not collective, and raises
        nothing."""
        if (writer := self._writer) is None:
            return None
        writer.heard.in_vain.set()
        writer.join()
        self._writer = None
        return writer.job.folder

    def discard(self, abandoned: Path | None) -> None:
        """Removes what saves that were abandoned have left, unless they are whole. Collective."""
        folders = self.comm.allgather_object(abandoned)
        if self.comm.rank == 0:
            for folder in {folder for folder in folders if folder is not None}:
                if not (folder / RUN).exists():
                    discard(folder)

    def _give_up(self, writer: _Writer, failures: Sequence[Failure | None]) -> None:
        writer.heard.in_vain.set()
        writer.join()
        self._writer = None
        self.comm.barrier()  # now nobody writes into the folder
        if self.comm.rank == 0 and not (writer.job.folder / RUN).exists():
            discard(writer.job.folder)
        try:
            raise_failures(str(writer.job.folder), failures)
        except CheckpointError as error:
            mend = "" if error.kind == "failed" else "mend it (a full disk: make room), then "
            raise CheckpointError(
                f"{error}\n  earlier checkpoints are as they were: {mend}go on with --resume", kind=error.kind
            ) from error


def _flat(held: Held) -> dict[str, Tensor]:
    return {f"{kind}/{name}": t for kind, named in held.items() for name, t in named.items()}


class _Writer(threading.Thread):
    """One rank's part of one save.

    whole: of rank 0, once it has committed.
    """

    def __init__(self, job: Save, rank: int, mine: Held, beside: Beside, then: Callable[[], object]) -> None:
        super().__init__(name="mpipipe-checkpoint", daemon=True)
        self.job, self.rank, self.mine, self.beside, self.then = job, rank, mine, beside, then
        self.began = time.perf_counter()
        self.heard = Heard(threading.Event(), threading.Event())
        self.whole: RunState | None = None
        self.failure: Failure | None = None

    def run(self) -> None:
        try:
            part = self.job.write(self.rank, self.mine)
            if self.rank == 0:
                self.whole = self.job.commit(part, self.heard, self.beside)
                self.then()
        except Exception as error:
            self.failure = Failure.of(error)

    def said(self) -> tuple[bool, Failure | None]:
        """Whether it is done, and why it has failed."""
        return not self.is_alive(), self.failure


def _check_names(found: Sequence[str], order: Sequence[str]) -> None:
    misfits = sorted(set(found) ^ set(order))
    if misfits:
        side = "held by no rank" if misfits[0] in order else "unknown to the model"
        raise CheckpointError(
            f"nothing saved: '{misfits[0]}' is {side} ({len(misfits)} such names); the ranks and the model "
            "must name the same parameters and buffers"
        )
