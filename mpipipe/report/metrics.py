"""metrics.jsonl: one JSON object per line, on disk as soon as it is said."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any

from mpipipe.report.scalars import Scalars


class Metrics:
    """Appends to `path`, and says the numbers to `scalars` as well. A line that a kill or a power cut has
    left torn is dropped first, with what follows it, so every line parses."""

    def __init__(self, path: str | Path, scalars: Scalars | None = None) -> None:
        path = Path(path)
        if path.exists():
            _keep(path, _whole_lines(path))
        self._file, self._scalars = path.open("a", encoding="utf-8"), scalars

    def write(self, *, step: int, **values: Any) -> None:
        """One line, such as write(step=3, loss=2.5). JSON has no NaN: it is written as "nan"."""
        self._file.write(json.dumps(_plain({"step": step, **values})) + "\n")
        self._file.flush()
        if self._scalars is not None:
            self._scalars.write(step, values)

    def close(self) -> None:
        self._file.close()
        if self._scalars is not None:
            self._scalars.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, up to one that is torn."""
    return [found for _, found in _whole_lines(Path(path))]


def cut_metrics(path: str | Path, step: int) -> None:
    """Forgets the first line that is beyond `step` or torn, and all that follow: a run that resumes there
    says them anew.

    In one system call, so that a kill leaves the old file or the new one. No file: nothing to forget.
    """
    path = Path(path)
    if path.exists():
        _keep(path, takewhile(lambda line: line[1].get("step", step) <= step, _whole_lines(path)))


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each with what it says, up to the first that is no JSON object: a kill cuts off the last one, and after
    a power cut some may be torn, or zeros."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            found = json.loads(line)
        except ValueError:
            return
        if not isinstance(found, dict):
            return
        yield line, found


def _keep(path: Path, first_lines: Iterable[tuple[bytes, dict[str, Any]]]) -> None:
    os.truncate(path, sum(len(line) + 1 for line, _ in first_lines))


def last_step(path: Path) -> int:
    """Of the last whole line; 0 where there is none."""
    lines = read_metrics(path) if path.exists() else []
    return int(lines[-1].get("step", 0)) if lines else 0
