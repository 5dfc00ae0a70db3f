"""Which ranks work, and which are spares: started, but without a part of the model until one is lost.

Ranks are called by their first numbers. The working ones are in the order of the plan, and one that is lost
is replaced where it was: so the plan of the others stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpipipe.errors import LaunchError
from mpipipe.planner.sizes import counted


def check_spares(spares: int, ranks: int, recover: str) -> None:
    """Raises LaunchError where nobody would be left to work, or nobody would ever call a spare."""
    if spares < 0:
        raise LaunchError(f"run.spares = {spares}; give 0 or more")
    if spares and recover != "mpi":
        raise LaunchError(
            f"run.spares = {spares}, and run.recover = {recover}: a spare takes over in the same job only; "
            "set run.recover=mpi, or leave spares out"
        )
    if spares >= ranks:
        raise LaunchError(
            f"run.spares = {spares}, and there {'is' if ranks == 1 else 'are'} {counted(ranks, 'rank')}: "
            f"none would train; start more than {spares} ranks, or lower run.spares"
        )


def first_working(node_of_rank: Sequence[int], spares: int) -> tuple[int, ...]:
    """All but so many spares: whole nodes but that of rank 0, the last first, then the last ranks.

    >>> first_working([0, 0, 1, 1, 2], 1), first_working([0, 1, 0, 1], 2), first_working([0, 0, 1, 1], 1)
    ((0, 1, 2, 3), (0, 2), (0, 1, 2))
    """
    left = list(range(len(node_of_rank)))
    for node in sorted({*node_of_rank} - {node_of_rank[0]}, reverse=True):
        there = [rank for rank in left if node_of_rank[rank] == node]
        if len(there) <= spares - (len(node_of_rank) - len(left)):
            left = [rank for rank in left if rank not in there]
    return tuple(left[: len(node_of_rank) - spares])


def next_working(working: Sequence[int], left: Sequence[int], node_of_rank: Sequence[int]) -> tuple[int, ...]:
    """After a loss: each one that is lost is replaced by a spare of its node if there is one, else by the
    first, then by none. working: before; left: all, spares too; node_of_rank: of the first world.

    >>> next_working([0, 1, 2], left=[0, 2, 3, 4], node_of_rank=[0, 1, 2, 0, 1])
    (0, 4, 2)
    >>> next_working([0, 1, 2], left=[2, 3], node_of_rank=[0, 0, 0, 0])
    (3, 2)
    """
    spare = [rank for rank in left if rank not in working]
    found = []
    for rank in working:
        if rank in left:
            found.append(rank)
        elif spare:
            here = [other for other in spare if node_of_rank[other] == node_of_rank[rank]]
            found.append((here or spare)[0])
            spare.remove(found[-1])
    return tuple(found)


def listed(spares: Sequence[int]) -> str:
    """For people.

    >>> listed([6, 7]), listed([])
    ('2 spares (ranks 6, 7)', 'no spare')
    """
    if not spares:
        return "no spare"
    names = ", ".join(map(str, spares))
    return f"{counted(len(spares), 'spare')} (rank{'s' if len(spares) > 1 else ''} {names})"
