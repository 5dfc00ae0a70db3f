"""Which ranks work, and which are spares: started, but without a part of the model until one is lost.

Ranks are called by their first numbers. The working ones are in the order of the plan, and one that is lost
is replaced where it was: so the plan of the others stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, TypeVar, cast

from mpipipe.cluster.comm import Communicator, RankLost
from mpipipe.cluster.survivors import check_tolerant
from mpipipe.errors import LaunchError, MpipipeError
from mpipipe.planner.sizes import counted, numbered

T = TypeVar("T")


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
    return f"{counted(len(spares), 'spare')} ({numbered('rank', spares)})"


class SharedWork:
    """Work of some ranks by calls that all of them make: spares wait for what each call comes to.

    world, comm       all ranks, and those that work
    working, spares   by their first numbers
    rank, size        the number of this one now, the spares behind the others, and how many work
    steps_done        how far the work is, on spares too
    recovers          whether it outlives ranks that work: recover = "mpi"
    say               takes the lines that are meant for people, on rank 0

    Until `divide` all ranks work. Raises LaunchError.
    """

    def __init__(
        self, world: Communicator, spares: int, recover: Literal["restart", "mpi"],
        say: Callable[[str], object],
    ) -> None:  # fmt: skip
        check_spares(spares, world.size, recover)
        if recover == "mpi":
            check_tolerant(world)
        self.world = self.comm = world
        self.working, self._nodes = first_working(world.node_of_rank, spares), world.node_of_rank
        self.rank, self.size, self.spares = world.rank, len(self.working), tuple[int, ...]()
        self.recovers, self.steps_done, self._say = recover == "mpi", 0, say
        self._within = False  # a shared call
        self._noted: set[int] = set()  # spares that are known to be lost

    def divide(self) -> None:
        """The ranks, into those that work and spares. Collective over all."""
        names, working = self.world.members, self.working
        self.spares = tuple(rank for rank in names if rank not in working)
        part = None if working == names else self.world.part([names.index(rank) for rank in working])
        self.comm = part or self.world  # of a spare, which makes no use of it
        self.rank, self.size = (*working, *self.spares).index(names[self.world.rank]), len(working)

    def divide_anew(self) -> None:
        """After RankLost: those that are left, with spares where ranks were lost. Collective over them."""
        self.world = self.world.survivors()
        self.working = next_working(self.working, self.world.members, self._nodes)
        self.divide()

    @property
    def waits(self) -> bool:
        """This rank is a spare; its `rank` is `size` or more."""
        return self.rank >= self.size

    def say(self, *values: object, sep: str = " ") -> None:
        """For people: one rank speaks. Called as `print` is: several values are one text, with `sep` between
        them."""
        if self.rank == 0:
            self._say(sep.join(map(str, values)))

    def say_by(self, say: Callable[[str], object]) -> None:
        """What takes the lines from here on."""
        self._say = say

    def shared(self, work: Callable[[], T]) -> T:
        """What the working ranks come to, or the error that they raise, on the spares too, which wait for it
        meanwhile: with messages of their own, so that nobody misses one that is lost. Collective over all."""
        if not self.spares or self._within:
            return work()
        if self.waits:
            found, failed, self.steps_done = self.world.recv_object(self._place(self.working[0]))
        else:
            found, failed = self._done_within(work)
            for spare in self.spares if self.rank == 0 else ():
                with suppress(RankLost):
                    self.world.send_object((found, failed, self.steps_done), self._place(spare))
        if failed is not None:
            raise failed
        return cast(T, found)

    def _done_within(self, work: Callable[[], T]) -> tuple[T | None, MpipipeError | None]:
        self._within = True
        try:
            return work(), None
        except MpipipeError as error:
            return None, error
        finally:
            self._within = False

    def _place(self, rank: int) -> int:
        return self.world.members.index(rank)

    def surviving(self, work: Callable[[], T], recover: Callable[[], object]) -> T:
        """As `shared`; when a rank is lost, `recover` and then the work anew, where the ranks outlive it."""
        lost = False
        while True:
            try:
                if lost:
                    recover()
                return self.shared(work)
            except RankLost:
                if not self.recovers:
                    raise
                lost = True  # and here nothing refers to what failed any more

    def lost_spares(self) -> tuple[int, ...]:
        """By their first numbers, those that are known to be lost, and that nobody has missed."""
        return tuple(rank for rank in self.world.gone() if rank in self.spares) if self.spares else ()

    def note_lost_spares(self) -> None:
        """Says once of each that it is lost."""
        gone = self.lost_spares()
        if new := [rank for rank in gone if rank not in self._noted]:
            self._noted.update(new)
            self.world.end_gone()
            left = listed([rank for rank in self.spares if rank not in gone])
            self.say(f"mpipipe: lost rank {', '.join(map(str, new))}, which was a spare; {left} left")
