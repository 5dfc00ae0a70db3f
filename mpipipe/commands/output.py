"""What several sub-commands write to `-o`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpipipe.errors import MpipipeError, PlanError
from mpipipe.state.files import write_text


def check_folder(output: str) -> None:
    """Before anything takes long. Raises PlanError."""
    folder = Path(output).parent
    if not folder.is_dir():
        raise PlanError(f"-o {output}: the folder {folder} is not there; make it first")


def write_output(path: Path, text: str) -> None:
    """A file appears whole; what is there and is none, such as /dev/stdout, is written to as it is."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
    else:
        write_text(path, text)


@contextmanager
def writing(
    output: str | Path, kind: type[MpipipeError] = PlanError, move: str = "name a file in a folder of yours"
) -> Iterator[None]:
    """An OSError within is one of `kind` that names `-o` and the next move."""
    try:
        yield
    except OSError as error:
        raise kind(f"-o {output}: cannot be written ({error.strerror}); {move}") from error
