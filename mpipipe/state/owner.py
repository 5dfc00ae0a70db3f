"""Who writes the checkpoints of a run: the ranks that began last.

Two starts of one run meet where a job is submitted twice, or where a network parts the ranks and both halves
go on. An earlier one ends before its next checkpoint.
"""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from mpipipe.errors import CheckpointError
from mpipipe.state.files import kind_of, write_text
from mpipipe.state.resume import survey
from mpipipe.values import Value, from_json, to_json

OWNER = "owner.json"


@dataclass(frozen=True)
class Owner(Value):
    """Of a run folder; host, pid: of the rank that writes the manifests."""

    id: str
    host: str
    pid: int
    since: str  # UTC


def own(run_dir: Path, step: float = math.inf) -> Owner:
    """From here on the checkpoints are this process's. step: it goes on after so many. Raises OSError, and
    CheckpointError where another start has saved more of them meanwhile: that one goes on."""
    for path, wrong in survey(run_dir, above=step):
        if not wrong:
            raise CheckpointError(
                f"{path}: saved by another start of this run, while this one was to go on from step {step}; "
                f"that one still runs, or see {run_dir / OWNER} for who it was, and start again"
            )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    owner = Owner(uuid4().hex, socket.gethostname(), os.getpid(), now)
    write_text(run_dir / OWNER, to_json(owner))
    return owner


def check_owner(run_dir: Path, mine: Owner) -> None:
    """Raises CheckpointError where it is another's by now, or cannot be read."""
    path = run_dir / OWNER
    try:
        found = from_json(Owner, path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read, so who writes here is unknown ({error})", kind=kind_of(error)
        ) from error
    if found.id != mine.id:
        raise CheckpointError(
            f"{path}: another start of this run writes here since {found.since}, on {found.host} as process "
            f"{found.pid}; this one, of {mine.since}, ends and leaves the run to it"
        )
