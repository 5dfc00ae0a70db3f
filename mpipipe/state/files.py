"""How a file appears: whole, on disk, under its name; or not at all.

    write NAME.part -> fsync -> rename to NAME -> fsync the folder

A kill at any byte leaves the old file or the new one, and perhaps a `.part` that nothing reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a temporary file, then gives it the name `path`. Raises OSError."""
    partial = path.with_name(path.name + ".part")
    partial.touch()  # with the permissions of any new file: safetensors writes files of its own for us alone
    mode = partial.stat().st_mode
    write(partial)
    partial.chmod(mode)
    _sync(partial, os.O_RDWR)
    partial.replace(path)
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


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
