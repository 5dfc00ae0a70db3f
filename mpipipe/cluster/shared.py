"""Does every node see the files of one of them?"""

from __future__ import annotations

import platform
import time
from pathlib import Path

from mpipipe.cluster.comm import Communicator
from mpipipe.errors import LaunchError

PATIENCE_S = 10.0  # network file systems show a new file to other nodes after a while


def check_seen(comm: Communicator, file: Path, patience_s: float = PATIENCE_S) -> None:
    """Raises LaunchError, on every rank, where some do not see a file that rank 0 has made in `run.dir`.
    Collective."""
    found = comm.allgather_object((platform.node(), _seen(file, patience_s)))
    blind = sorted({host for host, seen in found if not seen})
    if blind:
        raise LaunchError(
            f"run.dir = '{file.parent}': what rank 0 on {found[0][0]} writes there is not seen by "
            f"{', '.join(blind)}: the folder is each node's own, or ranks were started in different ones; "
            "set run.dir=/path/to/a/folder that all nodes share"
        )


def _seen(file: Path, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not file.is_file():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
