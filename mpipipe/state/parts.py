"""The parts of one checkpoint: which rank writes which file, what it leaves for rank 0, and the manifest.

rank k   model-*.safetensors, optimizer-*.safetensors -> rank-k.json: what they are
rank 0   its own, then waits for the rank-k.json of all -> indexes -> run.json
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from mpipipe.cluster.shared import look_anew
from mpipipe.errors import CheckpointError
from mpipipe.state.checkpoint import Kind, index_name, save_shard, shard_name, write_index
from mpipipe.state.digests import file_sha256, weights_sha256
from mpipipe.state.files import inside, kind_of, read_small, sync_folder, write_text
from mpipipe.state.resume import RUN, RunState, to_text
from mpipipe.state.writing import File, Written
from mpipipe.values import Value, from_json, to_json

Held = Mapping[Kind, Mapping[str, Tensor]]
Beside = Callable[[Path], Sequence[str]]  # writes further files into a folder and names them
PATIENCE_S = 120.0  # until rank 0 sees what another rank has written
_LONGEST_WAIT_S = 0.5  # between two looks


@dataclass(frozen=True)
class Part(Value):
    """What one rank has written."""

    save: str  # of which save: what an earlier one has left behind is not taken for it
    written: dict[Kind, Written]


@dataclass
class Heard:
    """Of rank 0 with the others, as its main thread hears of them."""

    all_written: threading.Event  # the others are done: what cannot be seen now lies elsewhere
    in_vain: threading.Event  # one has failed


@dataclass(frozen=True)
class Shards:
    """Which rank writes which tensors of one kind into which file; a rank with none writes no file."""

    kind: Kind
    files: dict[int, str]  # rank -> file
    file_of: dict[str, str]  # name -> file

    @classmethod
    def of(cls, kind: Kind, held: Sequence[Mapping[str, int]]) -> Shards:
        """held: by rank, the names and bytes of its tensors. Of what several replicas hold each writes about
        as much."""
        has, writer, holders = [0] * len(held), dict[str, int](), dict[str, list[int]]()
        for rank, names in enumerate(held):
            for name in names:
                holders.setdefault(name, []).append(rank)
        for name, ranks in holders.items():
            rank = writer[name] = min(ranks, key=has.__getitem__)
            has[rank] += held[rank][name]
        writers = sorted(set(writer.values()))
        files = {rank: shard_name(i, len(writers), kind) for i, rank in enumerate(writers)}
        return cls(kind, files, {name: files[rank] for name, rank in writer.items()})

    def mine(self, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that this rank writes."""
        return {name: t for name, t in tensors.items() if self.file_of[name] == self.files.get(rank)}


@dataclass(frozen=True)
class Save:
    """One checkpoint on its way; the same on every rank."""

    name: str  # no other save has it
    folder: Path
    order: Sequence[str]  # names of the model, canonical
    shards: Mapping[Kind, Shards]
    facts: RunState

    def mine(self, rank: int, held: Held) -> dict[Kind, dict[str, Tensor]]:
        return {kind: shards.mine(rank, held[kind]) for kind, shards in self.shards.items()}

    def write(self, rank: int, mine: Held) -> Part:
        """The shards of a rank, and what it has to say to rank 0. Raises CheckpointError, OSError."""
        written = {
            kind: save_shard(self.folder, list(of.files).index(rank), len(of.files), mine[kind], kind)
            for kind, of in self.shards.items()
            if rank in of.files
        }
        part = Part(self.name, written)
        if rank != 0 and written:
            write_text(self._record(rank), to_json(part))
        return part

    def commit(self, own: Part, heard: Heard, beside: Beside) -> RunState:
        """Waits for the parts of all ranks, then makes the folder a checkpoint; on rank 0.
        Raises CheckpointError, OSError."""
        others = sorted({rank for of in self.shards.values() for rank in of.files} - {0})
        parts = [own, *(self._wait_for(rank, heard) for rank in others)]
        for rank in others:
            self._record(rank).unlink()
        files = {name: file_facts(self.folder / name) for name in beside(self.folder)}
        for kind, shards in self.shards.items():
            written = [part.written[kind] for part in parts if kind in part.written]
            weight_map = {name: shards.file_of[name] for name in self._names(kind)}
            write_index(self.folder, weight_map, sum(w.tensor_bytes for w in written), kind)
            files |= {w.file: w.facts for w in written}
            files[index_name(kind)] = file_facts(self.folder / index_name(kind))
        models = [part.written["model"].digests for part in parts if "model" in part.written]
        digests = {name: digest for of_rank in models for name, digest in of_rank.items()}
        sha256 = weights_sha256([digests[name] for name in self.order])
        whole = replace(self.facts, files=files, weights_sha256=sha256)
        sync_folder(self.folder.parent)
        write_text(self.folder / RUN, to_text(whole))
        return whole

    def _names(self, kind: Kind) -> Sequence[str]:
        """All, in the order of their parameters; of state, any others last."""
        if kind == "model":
            return self.order
        place = {name: i for i, name in enumerate(self.order)}
        names = self.shards[kind].file_of
        return sorted(names, key=lambda name: (place.get(name.rpartition("/")[0], len(place)), name))

    def _record(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"

    def _wait_for(self, rank: int, heard: Heard) -> Part:
        ends, wait_s = float("inf"), 0.002
        while True:
            why: OSError | None = None
            try:
                if (part := self._seen(rank)) is not None:
                    return part
            except OSError as error:
                why = error
            if heard.in_vain.wait(wait_s):
                raise CheckpointError("another rank has failed")
            if ends == float("inf") and heard.all_written.is_set():
                ends = time.monotonic() + PATIENCE_S
            if time.monotonic() > ends:
                said = "" if why is None else f" ({why})"
                raise CheckpointError(
                    f"{self._record(rank)}: written by rank {rank}, and not seen from the node of rank 0 "
                    f"{PATIENCE_S:.0f} s later; put run.dir where every node sees it{said}",
                    kind="error" if why is None else kind_of(why),
                )
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _seen(self, rank: int) -> Part | None:
        """What a rank has written, once all of it can be seen from here. Raises OSError."""
        look_anew(self.folder)
        try:
            part = from_json(Part, read_small(inside(self.folder, f"rank-{rank}.json")))
            sizes = {w.file: inside(self.folder, w.file).stat().st_size for w in part.written.values()}
            if part.save == self.name and all(sizes[w.file] == w.facts.nbytes for w in part.written.values()):
                return part
        except ValueError:
            pass
        return None


def file_facts(path: Path) -> File:
    """Of a file that is no shard. Raises OSError."""
    return File(path.stat().st_size, file_sha256(path))
