"""An end for a doctor who waits for a rank, a network or a file system that does not answer."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

LATER_S = 5.0  # how much longer the other ranks wait: rank 0 is to speak
# what hangs -> what mostly helps
FIXES = {
    "the start of MPI": "mpirun -n 1 python -m mpipipe doctor  # alone; then two ranks of one node",
    "messages": "export OMPI_MCA_btl_tcp_if_include=10.0.0.0/8  # the network of all nodes; see `ip addr`",
    "files": "cd /tmp && python -m mpipipe doctor --dir /tmp  # without the file system of this folder",
}


class Watch:
    """Ends this process, and thereby the job, `limit_s` after it was made, unless closed before; it says what
    was `doing` then."""

    def __init__(self, limit_s: float, speak: Callable[[str], None]) -> None:
        self.doing, self._speak = "the imports", speak
        self._start(limit_s)

    def _start(self, limit_s: float) -> None:
        self._timer = threading.Timer(limit_s, self._end)
        self._timer.daemon = True
        self._timer.start()

    def restart(self, limit_s: float) -> None:
        self.close()
        self._start(limit_s)

    def close(self) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        try:
            self._speak(self.doing)
            sys.stdout.flush()
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)  # the main thread is stuck
