"""The errors a user can meet.

Each message names the place, both values, and the next move (house rule). `train.py` prints a
`MpipipeError` without a traceback, on one rank, and ends the whole job with a non-zero exit;
any other exception is a defect, of ours or of code of the user's, and keeps its traceback
(`cluster.ending.traceback_text`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MpipipeError(Exception):
    """Base of every error that is the user's to mend, but for those that another start may mend."""

    kind = "error"  # "failed": the supervisor starts again

    def __init__(self, *args: object, kind: str | None = None) -> None:
        """kind: of this one, where it is another than that of its class."""
        super().__init__(*args)
        if kind is not None:
            self.kind = kind


class ConfigError(MpipipeError):
    """A key or a value of the configuration is wrong."""


class DataError(MpipipeError):
    """The corpus or data set cannot be read or is too small."""


class EndOfData(DataError):
    """Data that is read in order, once, has been read; on every rank alike."""


class CaptureError(MpipipeError):
    """The model cannot be captured as a graph; the message holds the user's source line."""


class PlanError(MpipipeError):
    """No plan exists, or a given plan does not fit the model or the ranks."""


class DeadlockError(MpipipeError):
    """A program cannot run to its end without buffering; the message shows each blocked rank."""


class LaunchError(MpipipeError):
    """The launcher, the MPI library and the ranks do not fit each other."""


class RecoveryError(MpipipeError):
    """The ranks that are left of a job cannot go on; another start, with all ranks, may."""

    kind = "failed"


class CheckpointError(MpipipeError):
    """A checkpoint cannot be written or read."""


class UnreadableError(CheckpointError):
    """A checkpoint cannot be read just now, which does not say that it is damaged."""

    kind = "failed"


class ReportError(MpipipeError):
    """What a run has left behind is missing, damaged or of another version."""


def first_line(error: BaseException) -> str:
    """Of what it says; "" where that is nothing."""
    return str(error).strip().split("\n")[0]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Which of the known names is most like one that is not known; None where none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def did_you_mean(meant: str | None) -> str:
    """What a message adds to a name that is not known, such as `nearest` gives it.

    >>> "'trian' is no command" + did_you_mean(nearest("trian", ["train", "plan"]))
    "'trian' is no command; did you mean 'train'?"
    >>> did_you_mean(nearest("xyz", ["train", "plan"]))
    ''
    """
    return "" if meant is None else f"; did you mean {meant!r}?"
