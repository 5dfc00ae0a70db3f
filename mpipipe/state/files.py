"""How a file appears: whole, on disk, under its name; or not at all. And how one that somebody else may
have made is read.

    write NAME.part -> fsync -> rename to NAME -> fsync the folder

A kill at any byte leaves the old file or the new one, and perhaps a `.part` that nothing reads; an error
leaves no `.part`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mpipipe.errors import MpipipeError, UnreadableError

JSON_BYTES = 100_000_000  # of a header, an index or a manifest; that of the safetensors format
# of a file that is missing, cut off (None: `Shard` says so) or none; others say nothing of its bits
_DAMAGE = {None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # of a disk, of a quota, the limit of a file
_TO_MEND = _DAMAGE | _FULL | {  # those and permissions, names, what the file system or a process may not do
    errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.EINVAL,
    errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMFILE,
}  # fmt: skip


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a temporary file, then gives it the name `path`. Raises OSError."""
    partial = path.with_name(path.name + ".part")
    try:
        partial.touch()  # with the permissions of any new file: safetensors writes its own for us alone
        mode = partial.stat().st_mode
        write(partial)
        partial.chmod(mode)
        _sync(partial, os.O_RDWR)
        partial.replace(path)
    except BaseException as error:
        if isinstance(error, OSError):  # that of a write has no name
            error.filename = error.filename or str(path)
        with suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def link_whole(link: Path, target: str) -> None:
    """Points the symbolic link `link` at `target`, replacing an older link in one step."""
    partial = link.with_name(f"{link.name}.{os.getpid()}.part")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    partial.replace(link)


def sync_folder(folder: Path) -> None:
    """Puts on disk which names are in the folder. Raises OSError."""
    _sync(folder, os.O_RDONLY)


def check_name(name: str) -> None:
    """Raises ValueError for what is no name of a file in a folder."""
    if name in ("", ".", "..") or {"/", "\\"} & set(name) or not name.isprintable() or len(name) > 255:
        raise ValueError(f"{name[:255]!r} is no name of a file in this folder")


def inside(folder: Path, name: str) -> Path:
    """The file `name` of a folder. Raises ValueError for a name, or a link, that leads out of it."""
    check_name(name)
    path = folder / name
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise ValueError(f"{name!r} is a link that leads out of the folder")
    return path


def read_small(path: Path) -> bytes:
    """A whole file of JSON. Raises OSError, or ValueError for one that is larger than any of its kind."""
    with path.open("rb") as file:
        if (nbytes := os.fstat(file.fileno()).st_size) > JSON_BYTES:
            raise ValueError(f"{nbytes} bytes, no more than {JSON_BYTES} are read")
        return file.read()


def kind_of(error: Exception) -> str:
    """As `MpipipeError.kind`: an error of a file system, such as that of a network, may be gone at the next
    start, unless it is one that somebody has to mend."""
    if isinstance(error, MpipipeError):
        return error.kind
    return "failed" if isinstance(error, OSError) and error.errno not in _TO_MEND else "error"


def check_proves_damage(path: Path, error: Exception) -> None:
    """Raises UnreadableError for an error of reading that may be gone at the next try, as of a network or a
    disk; one of what was read proves it."""
    if isinstance(error, OSError) and error.errno not in _DAMAGE:
        raise UnreadableError(
            f"{path}: cannot be read just now ({error.strerror}), so nobody knows whether it is damaged; try "
            f"again, and where that does not help, move {path.parent} away",
            kind=kind_of(error),
        ) from error


def cannot_read(path: Path, error: Exception) -> str:
    """What to say where that proves damage. Raises UnreadableError as `check_proves_damage`."""
    check_proves_damage(path, error)
    return f"{path}: cannot be read ({error})"


def parse_json(text: bytes) -> Any:
    """Strict: no key twice, no infinity. Raises ValueError."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return found


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no number")


def free_bytes(folder: Path) -> int:
    """What may still be written where the nearest folder that is there lies."""
    there = next(f for f in (folder, *folder.absolute().parents) if f.is_dir())
    return shutil.disk_usage(there).free


@contextmanager
def room_in(folder: Path) -> Iterator[None]:
    """Makes an MpipipeError of a file of a run that found its disk, or quota, full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise MpipipeError(
            f"{error.filename or folder}: cannot be written ({error.strerror}), {free_bytes(folder)} bytes "
            "are free; checkpoints are as they were: make room, then go on with --resume"
        ) from error


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
