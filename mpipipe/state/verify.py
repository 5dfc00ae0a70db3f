"""Whether a checkpoint has the bits that were written: every byte of every file that its run.json names.

A shard's sha256 is made of those of its header and of its tensors, so ranks and threads share the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec

from mpipipe.cluster.comm import Communicator, gathered
from mpipipe.errors import UnreadableError
from mpipipe.state.checkpoint import Reader
from mpipipe.state.digests import PIECE_BYTES, file_sha256, pieces_digest, shard_sha256
from mpipipe.state.files import cannot_read, inside
from mpipipe.state.gather import together
from mpipipe.state.resume import RUN, proven_damage, read_state, survey
from mpipipe.state.shards import Shard, nbytes_of
from mpipipe.state.writing import File

P = ParamSpec("P")
RETRY_S = 2.0  # until a file that could not be read is tried again


def flaw(folder: Path, files: Mapping[str, File], threads: int = 1) -> str:
    """What is wrong with the first of these files whose bits are not those that were written; empty where all
    are well. Holds a few MiB per thread, whatever is in the files.

    Raises UnreadableError where a file cannot be read just now, twice.
    """
    with ThreadPoolExecutor(threads) as pool:
        for name, facts in files.items():
            if wrong := _twice(_flaw_of, folder, name, facts, pool):
                return wrong
    return ""


def _twice(look: Callable[P, str], *args: P.args, **kwargs: P.kwargs) -> str:
    """`look(...)`, after a while once more where a file cannot be read just now."""
    try:
        return look(*args, **kwargs)
    except UnreadableError:
        time.sleep(RETRY_S)
        return look(*args, **kwargs)


def _flaw_of(folder: Path, name: str, facts: File, pool: ThreadPoolExecutor) -> str:
    path = folder / name
    try:
        found = _sha256(inside(folder, name), pool)
    except (OSError, ValueError) as error:
        return cannot_read(path, error)
    return "" if found == facts.sha256 else _differ(path, found, facts)


def _sha256(path: Path, pool: ThreadPoolExecutor) -> str:
    """As in `File`. Raises OSError, ValueError."""
    if path.suffix != ".safetensors":
        return file_sha256(path)
    shard = Shard(path)
    return shard_sha256(shard.header, list(pool.map(lambda name: _digest(shard, name), shard.specs)))


def _digest(shard: Shard, name: str) -> str:
    spec = shard.specs[name]
    buffer = bytearray(min(PIECE_BYTES, nbytes_of(spec)))
    return pieces_digest(name, spec, shard.pieces(name, buffer))


def _differ(path: Path, found: str, facts: File) -> str:
    return f"{path}: its sha256 is {found[:12]}, {RUN} says {facts.sha256[:12]}"


def newest_sound(
    comm: Communicator, run_dir: Path, above: int = -1
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest checkpoint of a run with all the bits that were written, and what is wrong with the newer
    ones; `above` as in `survey`. Each rank reads a share of the files. Collective.

    Raises CheckpointError on every rank where one that may be sound cannot be read just now.
    """
    passed_over: list[tuple[Path, str]] = []
    found = survey(run_dir, above) if comm.rank == 0 else iter(())
    while (one := comm.bcast_object(next(found, None))) is not None:
        folder, wrong = one
        wrong = (wrong and _looked_at_again(comm, folder)) or _flaw_of_all(comm, folder)
        if not wrong:
            return folder, passed_over
        passed_over.append((folder, wrong))
    return None, passed_over


def _looked_at_again(comm: Communicator, folder: Path) -> str:
    return together(comm, str(folder), lambda: _twice(proven_damage, folder) if comm.rank == 0 else "")[0]


def _flaw_of_all(comm: Communicator, folder: Path) -> str:
    files = together(comm, str(folder), lambda: read_state(folder).files if comm.rank == 0 else {})[0]
    loads = [0] * comm.size
    mine = {}
    for name, facts in sorted(files.items(), key=lambda item: (-item[1].nbytes, item[0])):
        rank = loads.index(min(loads))
        loads[rank] += facts.nbytes
        if rank == comm.rank:
            mine[name] = facts
    return next(filter(None, together(comm, str(folder), lambda: flaw(folder, mine))), "")


def check_read(comm: Communicator, reader: Reader, files: Mapping[str, File]) -> None:
    """Whether what the ranks have read are the bits that were saved; files that they have not read as a whole
    are read now. files: as in `RunState`. Collective.

    Raises CheckpointError on every rank, with the file and both values.
    """
    read = gathered(comm, reader.digests)
    mine = [reader.index, *reader.files][comm.rank :: comm.size]
    wrong = (read_flaw(reader, file, read, files) for file in mine)
    for said in together(comm, str(reader.folder), lambda: next(filter(None, wrong), "")):
        if said:
            raise reader.damaged(said)


def read_flaw(reader: Reader, file: str, read: Mapping[str, str], files: Mapping[str, File]) -> str:
    """What is wrong with a shard of which the tensors in `read` (name -> digest) were read, or the index."""
    path = reader.folder / file
    if file not in files:
        return f"{path}: is not among the files that {RUN} names"
    if file == reader.index:
        return flaw(reader.folder, {file: files[file]})
    try:
        shard = Shard(inside(reader.folder, file))
    except (OSError, ValueError) as error:
        return cannot_read(path, error)
    if shard.specs.keys() != set(reader.files[file]):
        return f"{path}: has other tensors than the index says"
    if not read.keys() >= shard.specs.keys():
        return flaw(reader.folder, {file: files[file]})
    found = shard_sha256(shard.header, [read[name] for name in shard.specs])
    return "" if found == files[file].sha256 else _differ(path, found, files[file])
