"""Do all ranks hold the same plan, code and settings? Asked before the first message.

Ranks that differ would train without an error to different bits, or stop at a message of
another length. (The idea: PyOP2's check of source hashes.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import mpipipe
from mpipipe.cluster.comm import Communicator
from mpipipe.errors import LaunchError

MISSING = "(missing)"


def agree(comm: Communicator, facts: Mapping[str, str]) -> None:
    """Compare named facts (plan hash, code version, threads, torch, ...) over all ranks. Collective.

    Raises LaunchError on every rank, with one and the same message: the first rank that differs
    from rank 0, which fact, and both values.
    """
    by_rank = comm.allgather_object(dict(facts))
    differing = [rank for rank, theirs in enumerate(by_rank) if theirs != by_rank[0]]
    if not differing:
        return
    rank, first = differing[0], by_rank[0]
    theirs = by_rank[rank]
    fact = next(k for k in [*first, *theirs] if first.get(k) != theirs.get(k))
    raise LaunchError(
        f"the ranks do not agree on: {fact} ({len(differing)} of {comm.size} ranks differ from rank 0)\n"
        f"  rank 0 (node {comm.node_of_rank[0]}): {first.get(fact, MISSING)}\n"
        f"  rank {rank} (node {comm.node_of_rank[rank]}): {theirs.get(fact, MISSING)}\n"
        "  fix: start all ranks from one environment, one copy of mpipipe, and the same arguments"
    )


def code_version(extension: str = "") -> str:
    """sha256 (hex) over the package's Python sources and the version text of the compiled extension."""
    h = hashlib.sha256(extension.encode())
    package = Path(mpipipe.__path__[0])
    for path in sorted(package.rglob("*.py")):
        source = path.read_bytes()
        h.update(f"\n{path.relative_to(package).as_posix()} {len(source)}\n".encode() + source)
    return h.hexdigest()
