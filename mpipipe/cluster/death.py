"""Who died, as far as a launcher's last lines and exit code tell. For people: nothing is decided by it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

_SIGNALLED = (
    # Open MPI 5, Open MPI 4; MPICH and Intel MPI; srun
    r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on\s+signal (?P<signal>\d+)",
    r"RANK (?P<rank>\d+) PID \d+ RUNNING AT (?P<host>\S+)\s.*?(?:SIGNAL|STATUS): (?P<signal>\d+)",
    r"error: (?P<host>\S+): tasks? (?P<rank>[\d,-]+): (?P<name>Killed|Terminated|Aborted|Segmentation fault)",
)
_EXITED = (
    r"Process name: \[[^\]]*,(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)",
    r"error: (?P<host>\S+): tasks? (?P<rank>[\d,-]+): Exited with exit code (?P<code>\d+)",
)
_LOST = (r"Remote daemon:\s*\S+ on node (?P<host>\S+)", r"Node failure on (?P<host>\S+)")


def cause(code: int, said: Sequence[str], family: str = "") -> str:
    """One phrase. code: of the launcher, negative after a signal; said: its last lines on stderr; family: of
    MPIs, as `Starter` has it. That of MPICH says it on stdout, and ends with the number of the signal.

    >>> cause(137, ["process rank 1 with PID 7 on node n3 exited on", "signal 9 (Killed)."])
    'rank 1 on n3 was ended by SIGKILL'
    """
    text = " ".join(line.strip() for line in said)
    if found := _first(_SIGNALLED, text):
        by = found.get("name") or signal_name(int(found["signal"]))
        return f"rank {found['rank']} on {found['host']} was ended by {by}"
    if found := _first(_LOST, text):
        return f"the node {found['host']} was lost"
    if found := _first(_EXITED, text):
        on = f" on {found['host']}" if found.get("host") else ""
        return f"rank {found['rank']}{on} ended with exit code {found['code']}"
    if code < 0:
        return f"the launcher was ended by {signal_name(-code)}"
    if family == "MPICH" and code in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS):
        return f"a rank was ended by {signal_name(code)}"
    if code - 128 in signal.valid_signals():
        return f"the launcher ended with exit code {code}, as after {signal_name(code - 128)}"
    return f"the launcher ended with exit code {code}"


def _first(patterns: Sequence[str], text: str) -> dict[str, str] | None:
    found = (re.search(pattern, text) for pattern in patterns)
    return next((match.groupdict() for match in found if match), None)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
