"""How long a start takes, and whether the folder of the runs will do."""

from __future__ import annotations

from collections.abc import Iterator

from mpipipe.cluster.doctor.facts import Finding, RankFacts, Ranks, by_node
from mpipipe.cluster.doctor.judge.words import listed, size, who

LONG_START_S = 20.0
LITTLE_BYTES = 2 << 30  # a checkpoint of a model with 100 M parameters has 1.3 GB
UNKNOWN = "a file system of unknown type"
SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse", "panfs", "afs")


def judge_start(ranks: Ranks, threads: int) -> Iterator[Finding]:
    """Thousands of small files, read by all ranks at once, are what shared file systems are worst at."""
    slowest = max(ranks, key=lambda r: r.start.seconds)
    start, host = slowest.start, slowest.machine.host
    where = f"{start.prefix} is on {start.file_system or UNKNOWN}"
    text = f"{start.seconds:.1f} s until Python, numpy, torch and mpipipe were there"
    text += f" (rank {slowest.rank}, {host}); {where}" if len(ranks) > 1 else f"; {where}"
    if start.seconds <= LONG_START_S:
        yield Finding("start", "ok", text)
        return
    fix = f"cp -a {start.prefix} /tmp/env  # on each node; then start /tmp/env/bin/python"
    if slowest.launch.launcher == "srun":
        fix = f"srun --ntasks-per-node=1 cp -a {start.prefix} /tmp/env && export MPIPIPE_VENV=/tmp/env"
    yield Finding("start", "note", text, fix if start.file_system.startswith(SHARED) else "")


def judge_files(ranks: Ranks, threads: int) -> Iterator[Finding]:
    first = ranks[0].files
    if first is None:
        return
    for place, reason in first.failed:
        text = f"{place}: {reason}"
        if reason.startswith("a lock"):  # nothing here locks files, but libraries of data do
            yield Finding("files", "note", text)
        elif place == first.folder:
            yield Finding("files", "PROBLEM", text, "run.dir=/path/to/another/folder  # that all nodes see")
        else:
            yield Finding("files", "PROBLEM", text, "export TMPDIR=/path/to/another/folder")
    blind = [
        on_node[0] for on_node in by_node(ranks).values() if on_node[0].files and not on_node[0].files.seen
    ]
    if blind and not first.failed:
        text = f"{first.folder}: what rank 0 writes there is not seen by {who(blind)}"
        yield Finding("files", "PROBLEM", text, "run.dir=/path/to/a/shared/folder")
    text = f"{first.folder}: {size(first.free_bytes)} free, on {first.file_system or UNKNOWN}"
    if first.free_bytes < LITTLE_BYTES:
        yield Finding(
            "files", "note", f"{text}; checkpoints may not fit", "run.dir=/path/to/a/folder/with/room"
        )
    elif not first.failed:
        yield Finding("files", "ok", f"{text}; links, renames and fsync work")
    yield from _temporary(ranks, first.temporary)


def _temporary(ranks: Ranks, folder: str) -> Iterator[Finding]:
    nodes = [on_node[0] for on_node in by_node(ranks).values()]
    own: list[RankFacts] = [r for r in nodes[1:] if r.files and not r.files.temporary_seen]
    if own and folder:
        hosts = listed([r.machine.host for r in own])
        text = f"{folder} (TMPDIR) is each node's own ({hosts}): nothing that all ranks need may be there"
        yield Finding("files", "ok", text)
