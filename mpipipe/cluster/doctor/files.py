"""Does the folder of the runs do what checkpoints need, and do all nodes see it?"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.doctor.facts import Files
from mpipipe.cluster.doctor.machine import file_system

PATIENCE_S = 3.0  # network file systems show a new file to other nodes after a while
TEXT = "mpipipe doctor\n"
Failure = tuple[str, str]  # where, what and why


def examine(comm: Communicator, folder: Path) -> Files:
    """Tries the folder out on rank 0, in a folder of its own that is removed again, and looks for what was
    written from the other nodes. Collective."""
    tried = _try_out(folder) if comm.rank == 0 else (folder, "", [], [])
    folder, temporary, failed, written = comm.bcast_object(tried)
    try:
        seen = [_sees(mark) for mark in written]
        comm.barrier()
    finally:
        for mark in tried[-1]:
            shutil.rmtree(mark.parent, ignore_errors=True)
    return Files(
        folder=str(folder),
        file_system=file_system(folder),
        free_bytes=_free_bytes(folder),
        temporary=temporary,
        failed=tuple(failed),
        seen=seen[0] if seen else False,
        temporary_seen=seen[-1] if len(seen) > 1 else False,
    )


def _try_out(folder: Path) -> tuple[Path, str, list[Failure], list[Path]]:
    """The folder, or the innermost above it that there is, since it would be made there; the folder for
    temporary files; what failed; and two files, one in each of the two."""
    failed: list[Failure] = []
    written: list[Path] = []
    temporary = _temporary(failed)
    place = str(folder)
    try:
        folder = folder.absolute()
        folder = next(above for above in (folder, *folder.parents) if above.is_dir())
        for place in filter(None, (str(folder), temporary)):
            mark = Path(tempfile.mkdtemp(prefix=".mpipipe-doctor-", dir=place)) / "mark"
            written.append(mark)
            mark.write_text(TEXT, encoding="utf-8")
        failed.extend((str(folder), text) for text in _failing(written[0]))
    except OSError as error:
        failed.append((place, f"writing: {error.strerror}"))
    return folder, temporary, failed, written


def _temporary(failed: list[Failure]) -> str:
    try:
        return tempfile.gettempdir()
    except OSError as error:  # neither there nor in the usual places
        failed.append(("the folder for temporary files", str(error.strerror)))
        return ""


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:  # not on this node
        return 0


def _failing(mark: Path) -> Iterator[str]:
    other = mark.with_name("other")
    tries: dict[str, Callable[[], object]] = {
        "a symbolic link": lambda: other.symlink_to(mark.name),
        "renaming a file over a link": lambda: (
            other.with_name("new").write_text(TEXT),
            other.with_name("new").replace(other),
        ),
        "fsync of a file": lambda: _synced(mark, os.O_RDWR),
        "fsync of a folder": lambda: _synced(mark.parent, os.O_RDONLY),
        "a lock": lambda: _locked(mark),
    }
    for what, attempt in tries.items():
        try:
            attempt()
        except OSError as error:
            yield f"{what}: {error.strerror}"


def _synced(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _locked(path: Path) -> None:
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sees(path: Path) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return path.read_text(encoding="utf-8") == TEXT
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
