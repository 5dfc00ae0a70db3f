"""Network adapters of high-performance clusters: which are up, and which this process really uses."""

from __future__ import annotations

import os
from pathlib import Path

from mpipipe.cluster.node import ROOT, text

SLINGSHOT, OMNI_PATH, INFINIBAND = "sys/class/cxi", "sys/class/hfi1", "sys/class/infiniband"
FILES = ("/dev/infiniband/", "/dev/cxi", "/dev/hfi1")


def fabric(root: Path = ROOT) -> tuple[str, ...]:
    """Network adapters that are faster than TCP on them, those of which a port is up."""
    found = [f"{device.name} Slingshot" for device in _sorted(root / SLINGSHOT)]
    found += [f"{device.name} Omni-Path" for device in _sorted(root / OMNI_PATH)]
    for device in _sorted(root / INFINIBAND):
        layers = [
            text(port / "link_layer") or "InfiniBand"
            for port in _sorted(device / "ports")
            if "ACTIVE" in text(port / "state")
        ]
        if layers and not device.name.startswith("hfi1"):
            found.append(f"{device.name} {'InfiniBand' if layers[0] == 'InfiniBand' else 'RoCE'}")
    return tuple(found)


def _sorted(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def devices(root: Path = ROOT) -> tuple[str, ...]:
    """The device files of such adapters that this process has open: it really uses them."""
    used = set()
    for link in _sorted(root / "proc/self/fd"):
        try:
            target = os.readlink(link)
        except OSError:  # closed meanwhile
            continue
        if target.startswith(FILES):
            used.add(target)
    return tuple(sorted(used))
