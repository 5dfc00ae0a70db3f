"""The metrics as scalars for TensorBoard, by its own writer: an extra, with the package `tensorboard`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpipipe.errors import ConfigError

FOLDER = "tensorboard"  # in the run folder
_FLUSH_S = 10  # a kill loses no more of the drawings; metrics.jsonl has every step


def need_tensorboard() -> None:
    """Raises ConfigError if the package is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "run.tensorboard = true needs the package tensorboard, which is not installed: "
            "pip install 'mpipipe[tensorboard]', or set it to false"
        )


class Scalars:
    """One event file in `folder`. first_step: the one that is written next; points at it or beyond it, of a
    run that has been resumed before it, are not shown any more."""

    def __init__(self, folder: str | Path, first_step: int) -> None:
        proto = import_module("tensorboard.compat.proto.event_pb2")
        self._event = proto.Event
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        writer = import_module("tensorboard.summary.writer.event_file_writer")
        self._file = writer.EventFileWriter(str(folder), flush_secs=_FLUSH_S)
        start = proto.SessionLog(status=proto.SessionLog.START)
        self._file.add_event(proto.Event(wall_time=time.time(), step=first_step, session_log=start))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Tags are the names of metrics.jsonl; what is no number, as a list of lost ranks, has no curve."""
        numbers = {
            name: v for name, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)
        }
        summary = self._summary(
            value=[self._summary.Value(tag=name, simple_value=v) for name, v in numbers.items()]
        )
        self._file.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._file.close()
