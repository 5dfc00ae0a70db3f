"""Does every node see the files of one of them, and soon?"""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from pathlib import Path

from mpipipe.cluster.comm import Communicator
from mpipipe.errors import LaunchError

PATIENCE_S = 10.0  # network file systems show a new file to other nodes after a while


def look_anew(folder: Path) -> None:
    """Before a look for a file that another node may have made there. A client of NFS that has looked for one
    in vain trusts that for up to a minute; but of what is opened, a folder too, it asks the server whether it
    has changed, and then for its files anew."""
    with suppress(OSError):  # it is not there yet
        os.close(os.open(folder, os.O_RDONLY))


def check_seen(comm: Communicator, file: Path, patience_s: float = PATIENCE_S) -> None:
    """Raises LaunchError, on every rank, where some do not see a file that rank 0 has made in `run.dir`.
    Collective."""
    found = comm.allgather_object((platform.node(), seen(file, patience_s)))
    blind = sorted({host for host, there in found if not there})
    if blind:
        raise LaunchError(
            f"run.dir = '{file.parent}': what rank 0 on {found[0][0]} writes there is not seen by "
            f"{', '.join(blind)}: the folder is each node's own, or ranks were started in different ones; "
            "set run.dir=/path/to/a/folder that all nodes share"
        )


def seen(file: Path, patience_s: float = PATIENCE_S) -> bool:
    """Whether this process sees a file that another one has made, at the latest after a while."""
    deadline = time.monotonic() + patience_s
    while True:
        look_anew(file.parent)
        if file.is_file():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
