"""What no placement can undercut, in numpy alone."""

from __future__ import annotations

import numpy as np

from mpipipe.planner.placement.items import Items


def simple_bound_s(items: Items, n_accelerators: int, n_cpus: int) -> float:
    """Seconds: the slowest item on its faster device, and all the work when it could be parted at will.

    Parted at will, CPUs take the items first on which they lose least, until they are as loaded as the
    accelerators: at load T accelerators can do n_accelerators * T, CPUs the rest in n_cpus * T.
    """
    fastest = np.minimum(items.accelerator_s, items.cpu_s if n_cpus else np.inf)
    slowest = float(fastest.max())
    if not n_cpus or not np.isfinite(slowest):
        return max(slowest, float(items.accelerator_s.sum()) / n_accelerators)
    with np.errstate(divide="ignore", invalid="ignore"):
        slower = np.where(items.accelerator_s > 0, items.cpu_s / items.accelerator_s, np.inf)
    slower[items.accelerator_s == np.inf] = 0.0
    order = np.argsort(slower, kind="stable")
    cpu = np.concatenate([[0.0], np.cumsum(items.cpu_s[order])]) / n_cpus
    rest = np.concatenate([np.cumsum(items.accelerator_s[order][::-1])[::-1], [0.0]]) / n_accelerators
    i = int(np.argmax(cpu >= rest))  # the items before i - 1 are on CPUs, item i - 1 on both
    if i == 0:
        return max(slowest, float(rest[0]))
    if not np.isfinite(rest[i - 1]):
        return max(slowest, float(cpu[i]) if not np.isfinite(items.accelerator_s[order[i - 1]]) else 0.0)
    falls, rises = rest[i - 1] - rest[i], cpu[i] - cpu[i - 1]
    share = (rest[i - 1] - cpu[i - 1]) / (falls + rises)
    return max(slowest, float(cpu[i - 1] + share * rises))
