"""Who writes into a run folder: the ranks that began last, and no others.

Two starts of one run meet where a job is submitted twice, or where a network parts the ranks and both halves
go on. What an earlier one has under way is not made a checkpoint any more, and it ends.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from mpipipe.errors import CheckpointError
from mpipipe.state.files import write_text
from mpipipe.values import Value, from_json, to_json

OWNER = "owner.json"


@dataclass(frozen=True)
class Owner(Value):
    """Of a run folder; host, pid: of the rank that writes the manifests."""

    id: str
    host: str
    pid: int
    since: str  # UTC


def own(run_dir: Path) -> Owner:
    """From here on the folder is this process's. Raises OSError."""
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
        raise CheckpointError(f"{path}: cannot be read, so who writes here is unknown ({error})") from error
    if found.id != mine.id:
        raise CheckpointError(
            f"{path}: another start of this run writes here since {found.since}, on {found.host} as process "
            f"{found.pid}; this one, of {mine.since}, ends and leaves the run to it"
        )
