"""The hosts of a run that restarts: those of `--hosts` or of the Slurm job, and which of them answer."""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from mpipipe.cluster.starter import Host, Starter
from mpipipe.errors import LaunchError

ANSWER_S = 30.0  # a host that has not started one small program by then is left out
# flags of sinfo(1): - planned by the backfill scheduler, @ ^ a reboot is pending or issued, + completing,
# $ maintenance; a node with * does not respond, and ~ # ! % are of its power
_UP = re.compile(
    r"(allocated|mixed|idle|completing|planned|maint|resv|reserved|draining|mix|alloc|comp|plnd|drng)[-@^+$]*"
)


def parse(text: str, ranks: int | None) -> list[Host]:
    """Of "a,b" or "a:4,b:4"; hosts without a number share `ranks` evenly. Raises LaunchError."""
    parts = [part.rpartition(":") if ":" in part else (part, "", "") for part in text.split(",")]
    if not all(name and (not colon or slots.isdigit()) for name, colon, slots in parts):
        raise LaunchError(f"--hosts {text}: expected names, such as a,b or a:4,b:4")
    even = math.ceil((ranks or len(parts)) / len(parts))
    return [Host(name, int(slots) if slots else even) for name, _, slots in parts]


def of_slurm(environ: Mapping[str, str], ranks: int | None) -> list[Host] | None:
    """Of the job that this process is in; None where it is in none."""
    listed = environ.get("SLURM_JOB_NODELIST")
    if not listed:
        return None
    names = _said(["scontrol", "show", "hostnames", listed]).split()
    return parse(",".join(names), ranks) if names else None


def down(hosts: Sequence[Host]) -> set[str]:
    """Those that Slurm does not count on any more; none where there is no Slurm."""
    names = ",".join(host.name for host in hosts)
    lines = _said(["sinfo", "--noheader", "--Node", "--nodes", names, "--format", "%N %T"]).splitlines()
    states = [line.split() for line in lines if len(line.split()) == 2]
    return {name for name, state in states if not _UP.fullmatch(state)}


def answering(
    hosts: Sequence[Host], starter: Starter, program: Sequence[str], environ: Mapping[str, str]
) -> list[Host]:
    """The hosts on which a program could be started, and ended well. All are asked at once."""
    asked = {
        host: subprocess.Popen(
            starter.alone(host, program), env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )
        for host in hosts
    }  # fmt: skip
    found, end = [], time.monotonic() + ANSWER_S
    for host, process in asked.items():
        with suppress(subprocess.TimeoutExpired):
            if process.wait(max(0.0, end - time.monotonic())) == 0:
                found.append(host)
        if process.poll() is None:
            process.kill()
            process.wait()
    return found


def _said(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
