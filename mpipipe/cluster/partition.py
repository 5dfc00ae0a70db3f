"""What a partition of the Slurm at hand has, as sinfo(1) tells."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from mpipipe.errors import LaunchError

ASK_S = 30.0  # a busy Slurm takes seconds
FORMAT = "%P|%D|%c|%X|%Y|%m|%l"


@dataclass(frozen=True)
class Partition:
    name: str
    nodes: int
    cores: int  # of each node
    node_bytes: int
    limit_s: float  # of a job


def partition(name: str | None) -> Partition | None:
    """The one of that name, of several "a,b" the largest, or the default one; None where there is no Slurm.
    Raises LaunchError."""
    if shutil.which("sinfo") is None:
        return None
    then = "ask again when Slurm answers"
    told = ask(["sinfo", "--noheader", f"--format={FORMAT}"], then)
    if told.returncode:
        raise LaunchError(f"sinfo: {told.stderr.strip()}; {then}")
    return parsed(told.stdout, name)


def ask(command: Sequence[str], then: str) -> subprocess.CompletedProcess[str]:
    """A command of Slurm, and what it says. then: what to do where there is no answer. Raises LaunchError."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ASK_S)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{shlex.join(command)}: no answer within {ASK_S:g} s; {then}") from error


def parsed(lines: str, name: str | None) -> Partition:
    """Of several lines for one partition, whose nodes differ, the largest. Raises LaunchError.

    >>> parsed("main*|2|8|1|4|4000|infinite", None)
    Partition(name='main', nodes=2, cores=4, node_bytes=4194304000, limit_s=inf)
    """
    rows = [line.split("|") for line in lines.splitlines()]
    asked = () if name is None else name.split(",")
    found = [row for row in rows if (row[0].rstrip("*") in asked if asked else row[0].endswith("*"))]
    if not found:
        names = ", ".join(dict.fromkeys(row[0].rstrip("*") for row in rows))
        raise LaunchError(
            f"--partition {name}: this Slurm has {names}; name one" if name else
            f"this Slurm has no default partition, but {names}; name one by --partition"
        )  # fmt: skip
    label, nodes, cpus, sockets, per_socket, mib, limit = max(found, key=lambda row: int(row[1]))
    return Partition(
        name=label.rstrip("*"),
        nodes=int(nodes),
        cores=max(1, min(_number(cpus), _number(sockets) * _number(per_socket))),  # CPUs may be hyperthreads
        node_bytes=_number(mib) << 20,
        limit_s=seconds(limit),
    )


def _number(text: str) -> int:
    """Of "4000+", where nodes differ, the least."""
    return int(re.sub(r"\D", "", text) or 0)


def seconds(text: str) -> float:
    """Of a time as Slurm writes it.

    >>> seconds("30"), seconds("10:00"), seconds("1-02:00:00"), seconds("infinite")
    (1800.0, 600.0, 93600.0, inf)
    """
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return math.inf
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # days-hours:minutes:seconds
        parts += [0] * (3 - len(parts))
    elif len(parts) == 1:  # minutes
        parts = [0, parts[0], 0]
    parts = [0] * (3 - len(parts)) + parts
    return 86400.0 * int(days or 0) + 3600.0 * parts[0] + 60.0 * parts[1] + parts[2]


def minutes(seconds: float) -> str:
    """As sbatch takes it, rounded up.

    >>> minutes(3601.0)
    '1:01:00'
    """
    whole = math.ceil(seconds / 60.0)
    return f"{whole // 60}:{whole % 60:02}:00"
