"""How long this process took to start, and which environment it is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mpipipe.cluster.doctor.facts import Start
from mpipipe.cluster.doctor.machine import file_system
from mpipipe.cluster.node import ROOT, text


def age_s(root: Path = ROOT) -> float:
    """Seconds since this process was started (proc_pid_stat(5), in clock ticks since the boot)."""
    words = text(root / "proc/self/stat").rpartition(")")[2].split()
    uptime = text(root / "proc/uptime").split()
    if len(words) < 20 or not uptime:
        return 0.0
    return max(0.0, float(uptime[0]) - int(words[19]) / os.sysconf("SC_CLK_TCK"))


def start(seconds: float) -> Start:
    return Start(seconds, sys.executable, sys.prefix, file_system(Path(sys.prefix)))
