"""From a file or folder to one file of bytes. Nothing is downloaded."""

from __future__ import annotations

import io
import os
import sysconfig
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG
from typing import TypeGuard

from mpipipe.errors import DataError
from mpipipe.state.files import kind_of
from mpipipe.state.rundir import is_run

_OF_OLD = "corpus.bin"  # in the run folder: of whatever text, as earlier versions wrote it
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lost+found"}


def corpus_path(path: str | None, run_dir: Path) -> Path:
    """The file of bytes: `path` itself when it is a file, else the one that `write_corpus` makes."""
    if _is_file(path):
        return Path(path)
    target, old = _target(path, run_dir), run_dir / _OF_OLD
    return old if old.exists() and not target.exists() else target


def _is_file(path: str | None) -> TypeGuard[str]:
    return path is not None and not Path(path).is_dir()


def _target(path: str | None, run_dir: Path) -> Path:
    """Named by `path`: a start with another text, which may be refused or killed, leaves this one alone."""
    return run_dir / f"corpus-{sha256(repr(path).encode()).hexdigest()[:8]}.bin"


def write_corpus(path: str | None, folder: Path, run_dir: Path) -> Path:
    """Concatenates a folder's files, or the Python standard library's (`path` None), in the order
    of their names into `folder`, which may be one in the run folder. A file is left where it is. Raises
    DataError."""
    if path is not None and not Path(path).exists():
        raise DataError(
            f"data.path = '{path}': no such file or folder; there is none at {Path(path).absolute()}; name "
            "one with text, or null for the standard library's"
        )
    if _is_file(path):
        return Path(path)
    if path is not None and Path(path).resolve() == run_dir.resolve():
        raise DataError(
            f"data.path = '{path}': is the folder that this run writes to; name another run.dir, such as "
            f"{Path(path) / 'run'}"
        )
    target = _target(path, folder)
    files = list(_stdlib_files() if path is None else text_files(Path(path), run_dir))
    if not files:
        raise DataError(
            f"data.path = '{path or _stdlib()}': holds no file; name a folder with text, or a file"
        )
    _join(files, target)
    return target


def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_files() -> Iterator[Path]:
    return (f for f in text_files(_stdlib()) if f.suffix == ".py")


def text_files(folder: Path, run_dir: Path | None = None) -> Iterator[Path]:
    """All visible text files under `folder` in name order, without caches, installed packages, tests and
    runs, that in `run_dir` among them: they would train on what they write. Raises DataError."""

    def fails(error: OSError) -> None:
        raise error

    own = run_dir and run_dir.resolve()
    try:
        for at, folders, files in os.walk(folder, onerror=fails):
            root = Path(at)
            if root != folder and (is_run(folders, files) or root.resolve() == own):
                folders.clear()
                continue
            folders[:] = sorted(f for f in folders if f not in _SKIPPED and not f.startswith("."))
            visible = (root / f for f in sorted(files) if not f.startswith("."))
            yield from (f for f in visible if _is_text(f))
    except OSError as error:
        raise DataError(
            f"{error.filename}: cannot be read ({error.strerror}); mend or remove it", kind=kind_of(error)
        ) from error


def _is_text(file: Path) -> bool:
    """As git and grep decide it: no zero byte near the start. Raises OSError."""
    if not S_ISREG(file.stat().st_mode):  # a pipe, say, of which one would wait for somebody to write
        return False
    with file.open("rb") as start:
        return b"\0" not in start.read(8192)


def _join(files: list[Path], target: Path) -> None:
    """Written under another name and renamed: a corpus is whole or not there."""
    partial = target.with_suffix(".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb", buffering=0) as out:  # else the end of a file fails at that of another
            for file in files:
                _append(out, file.read_bytes())
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(
            f"{error.filename or file}: cannot be copied to {target} ({error.strerror}); mend or remove it, "
            "or make room for the whole text in run.dir",
            kind=kind_of(error),
        ) from error


def _append(out: io.FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:  # a disk that is almost full takes a part
        left = left[out.write(left) :]
