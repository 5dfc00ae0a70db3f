"""How a run outlives its ranks: what it keeps for that, and how it goes on where one was lost or is slow; and
how it goes over to a layout that its first steps have shown to be better.

    RankLost -> survivors -> plan for them -> newest version that is whole among them -> its tensors, by name,
    to their new owners -> new mirrors, at once

Where a rank was lost together with its partner the newest checkpoint serves, or the start of the run; so does
a checkpoint that is newer than the mirrors. Which ranks work then: `mpipipe.cluster.spares`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mpipipe.cluster.comm import Communicator, RankLost
from mpipipe.cluster.memory import give_back_freed_memory
from mpipipe.errors import CheckpointError, DeadlockError, MpipipeError, PlanError, RecoveryError
from mpipipe.graph.source import Initial
from mpipipe.graph.variants import Variants
from mpipipe.planner.asked import Asked, copies_of
from mpipipe.planner.change import fits_still, pays_off, stays_as_it_is
from mpipipe.planner.copies import Copies, shape_of
from mpipipe.planner.prediction import expect
from mpipipe.planner.programs import program_for
from mpipipe.planner.refine import refined_costs
from mpipipe.planner.schedules import PLAIN
from mpipipe.planner.sizes import counted
from mpipipe.planner.speeds import FACTOR, busy_s, compared, with_recovered_ranks
from mpipipe.runtime.optimizer import described
from mpipipe.runtime.trainer import Trainer, check_tags
from mpipipe.runtime.weights import updates_of
from mpipipe.state.checkpoint import Reader
from mpipipe.state.gather import together
from mpipipe.state.mirrors import Found, Mirrors, Received, apart, fetch, held, newest_whole, offered
from mpipipe.state.resume import read_state
from mpipipe.state.saving import Saver
from mpipipe.values import Cluster, Costs, Layout, Plan, Timeline

if TYPE_CHECKING:
    from mpipipe.pipeline import Pipeline

Newest = Callable[[Communicator, int], Path | None]  # a checkpoint of more steps than that
LOOKS = (4, 8, 16, 32)  # steps of a layout, the first left out, after which it is planned anew
MOST = 0.02  # of what the run still takes: for the search


@dataclass(frozen=True)
class Recovery:
    """What one recovery came to, the same on every rank but for its seconds."""

    lost: tuple[int, ...]  # ranks, by the numbers that they had at first
    step: int  # steps done where the run goes on
    replayed: int  # steps that had been done and are done again
    source: str  # for people: where the state is from
    seconds: float


class Survival:
    """Of one rank. Between two steps it is given the pipeline, and puts there anew what depends on the ranks:
    their world, the costs, the plan, the trainer, the saver and the steps done; nothing else of it.

    asked    what the plan of the start was searched among
    cluster  all ranks, by their first numbers
    initial  first values of the weights
    resumed  folder of the checkpoint that the run has begun from
    """

    def __init__(self, asked: Asked, cluster: Cluster, initial: Initial | None, resumed: Path | None) -> None:
        self._asked, self._cluster, self._initial, self._resumed = asked, cluster, initial, resumed
        self._kept: list[Mirrors] = []  # of its world, and until they are whole those of the world before
        self._has_worked = False
        self.looks = list(LOOKS)  # that are left

    def begin(self, comm: Communicator, plan: Plan) -> None:
        """On a rank that works: mirrors from here on, as often as the plan says."""
        every = plan.layout.mirror_every
        self._kept = [Mirrors(comm, every, plan.hash)] if every and comm.size > 1 else []
        self._has_worked = True

    def after_step(self, step: int, trainer: Trainer) -> None:
        """`step` steps are done. Collective."""
        for mirrors in self._kept[-1:]:
            mirrors.commit()
            if step % mirrors.every == 0:
                _take(mirrors, step, trainer)

    # -- a rank was lost -----------------------------------------------------------------------

    def recover(self, pipe: Pipeline, checkpoint: Newest) -> Recovery:
        """As `Pipeline.recover`."""
        started, before, lost = time.perf_counter(), pipe.steps_done, pipe.world.lost
        abandoned = pipe.saver.abandon()
        while True:
            try:
                source = self._go_on(pipe, checkpoint)
                if not pipe.waits:
                    pipe.saver.discard(abandoned)
                    before = max(pipe.comm.allgather_object(before))  # some may have been a step further
                break
            except RankLost:  # one more
                continue
        gone = tuple(rank for rank in pipe.world.lost if rank not in lost)
        took_s, replayed = time.perf_counter() - started, before - pipe.steps_done
        return Recovery(gone, pipe.steps_done, replayed, source, took_s)

    def _go_on(self, pipe: Pipeline, checkpoint: Newest) -> str:
        abandoned: Trainer | None = vars(pipe).pop("trainer", None)
        loads = None if abandoned is None else abandoned.feed.ahead
        del abandoned
        gc.collect()
        pipe.divide_anew()
        pipe.saver, comm = Saver(pipe.comm), pipe.comm
        if pipe.waits:
            return ""
        try:
            pipe.plan = self._plan_for_those_left(pipe)
        except (PlanError, DeadlockError) as error:
            raise RecoveryError(f"the run does not fit the ranks that are left: {error}") from error
        self.looks = min(comm.allgather_object(self.looks), key=len)  # a spare knows of none
        found = self._find(comm)
        folder = checkpoint(comm, -1 if found is None else found.key.step)
        if found is not None and folder is None:
            self._take_up(pipe, found, held(self._kept, found))
            source = "mirrors"
            if not pipe.data.exact:
                pipe.say("note: this recovery is not exact: the data is a plain iterable, and cannot go back")
        else:
            folder = folder or self._resumed
            weights = None if folder is None else Reader(folder, "model")
            pipe.variants.source.begin_from(weights or self._initial)
            pipe.build()
            pipe.steps_done, source = 0, "the start"
            if folder is not None and weights is not None:
                pipe.resume(weights, read_state(folder))
                source = str(folder)
            pipe.variants.source.begin_from(self._initial)
        if loads is not None:
            pipe.trainer.feed.ahead.after(loads)
        self._begin_anew(pipe)
        return source

    def _plan_for_those_left(self, pipe: Pipeline) -> Plan:
        """The plan as it is, where spares can do as it says; else another one. Collective."""
        comm = pipe.comm
        worked = comm.allgather_object(self._has_worked)
        if len(set(worked)) > 1:  # a spare that takes over knows what was planned at the start
            known = comm.bcast_object((self._cluster, pipe.costs, pipe.plan), worked.index(True))
            self._cluster, pipe.costs, pipe.plan = known
            self._has_worked = True
        pipe.costs = replace(pipe.costs, cluster=self._cluster.in_order(comm.members))
        if fits_still(pipe.costs, pipe.plan):
            return pipe.plan_for(self._asked, pipe.plan)
        schedules = tuple(dict.fromkeys([*self._asked.schedules, PLAIN[0]]))  # some need a number of ranks
        return self._plan_anew(pipe, schedules, copies_of("auto", pipe.numerics, pipe.size))

    def _find(self, comm: Communicator) -> Found | None:
        """As `newest_whole`; the memory of other versions is given back. Collective."""
        found = newest_whole(comm, self._kept)
        if found is not None:
            for mirrors in self._kept:
                mirrors.keep_only(found.key.step)
        return found

    # -- a rank is slow ------------------------------------------------------------------------

    def plan_around(self, pipe: Pipeline, slower: Mapping[int, float]) -> tuple[bool, str]:
        """As `Pipeline.plan_around`."""
        comm, before, by_first = pipe.comm, pipe.plan, pipe.comm.members
        if not pipe.data.exact:
            return False, "the plan stays: the data is a plain iterable, and cannot go back"
        self._cluster = self._cluster.slowed({by_first[rank]: by for rank, by in slower.items()})
        try:
            plan = self._plan_anew(pipe, self._asked.schedules, (shape_of(before.layout),))
            stays, said = stays_as_it_is(pipe.costs, before, plan)
        except MpipipeError as error:
            plan, stays, said = before, True, f"the plan stays: {error}"
        taken = False
        if not comm.bcast_object(stays):
            taken, said = self._go_over(pipe, plan, said)
        if not taken:
            _expect_with(pipe, pipe.costs)
        return taken, said

    # -- its steps have shown what they take -----------------------------------------------------

    def shown(self, pipe: Pipeline, steps_left: int) -> list[Timeline]:
        """As `Pipeline.shown`."""
        recorder = pipe.recorder
        if not self.looks or recorder.counted < self.looks[0]:
            return []
        searches = len(self.looks)
        del self.looks[0]
        if not pipe.comm.bcast_object(searches * pipe.search_s <= MOST * steps_left * recorder.step_s):
            return []
        return recorder.typical(pipe.predicted)

    def refine(self, pipe: Pipeline, typical: Sequence[Timeline], steps_left: int) -> tuple[bool, str]:
        """As `Pipeline.refine`."""
        if not pipe.data.exact:
            return False, "the plan stays: the data is a plain iterable, and cannot go back"
        before, planned, steps = pipe.plan, pipe.costs, pipe.recorder.counted
        costs = with_recovered_ranks(planned, busy_s(typical[0]), busy_s(pipe.predicted))
        self.take_speeds(pipe.comm, costs.cluster)
        if costs is not planned:  # also where the plan stays, or others would seem slow beside it
            _expect_with(pipe, costs)
        try:
            pipe.costs, *parts = (refined_costs(costs, before.layout, each) for each in typical)
            plan = self._plan_anew(pipe, self._asked.schedules, (shape_of(before.layout),))
        except MpipipeError as error:
            pipe.costs = costs
            return False, f"the plan stays: {error}"
        found = pays_off(before, plan, parts, steps_left, pipe.build_s) if pipe.rank == 0 else (True, "")
        stays, said = pipe.comm.bcast_object(found)
        taken = False
        if not stays:
            slow = _slower(pipe.predicted, typical[0])
            taken, said = self._go_over(pipe, plan, f"after {counted(steps, 'step')} {said}{slow}")
        if not taken:
            pipe.costs = costs
        return taken, said

    def take_speeds(self, comm: Communicator, cluster: Cluster) -> None:
        """The ranks that there are compute as fast as they do in `cluster`, in plans from now on."""
        devices = list(self._cluster.devices)
        for first, now in zip(comm.members, cluster.devices, strict=True):
            devices[first] = replace(devices[first], speed=now.speed)
        self._cluster = replace(self._cluster, devices=tuple(devices))

    def _go_over(self, pipe: Pipeline, plan: Plan, said: str) -> tuple[bool, str]:
        """From one step to the next, to another layout, unless the optimizer keeps what nothing can hold, or
        what was evaluated cannot be cut so. Collective."""
        comm, trainer = pipe.comm, pipe.trainer
        try:
            numbers = together(comm, "the optimizer's state", trainer.optimizer_numbers)[comm.rank]
            together(comm, "another plan", lambda: _check(pipe.variants, plan, comm))
        except CheckpointError as error:
            return False, f"the plan stays: {error}"
        pipe.saver.finish()
        pipe.saver.let_go()
        for mirrors in self._kept:
            mirrors.commit()
            mirrors.keep_only(
                max((key.step for key in mirrors.whole()), default=-1)
            )  # for a rank that is lost
        here = trainer.tensors()
        found = offered(comm, pipe.steps_done, pipe.plan.hash, here, numbers)
        del trainer
        pipe.trainer.close()
        del pipe.trainer  # all but its state
        give_back_freed_memory()
        apart(here)
        pipe.plan = plan
        self._take_up(pipe, found, here)
        give_back_freed_memory()
        self._begin_anew(pipe)
        return True, said

    # -- either --------------------------------------------------------------------------------

    def _plan_anew(self, pipe: Pipeline, schedules: tuple[str, ...], copies: tuple[Copies, ...]) -> Plan:
        """For the ranks that there are, as they are. Collective."""
        pipe.costs = replace(pipe.costs, cluster=self._cluster.in_order(pipe.comm.members))
        asked = replace(self._asked, schedules=schedules, n_ranks=pipe.size, copies=copies, uneven=False)
        return pipe.plan_for(asked)

    def _take_up(self, pipe: Pipeline, found: Found, here: dict[str, Tensor]) -> None:
        """A version, in the layout of the plan. here: of it, on this rank; empty after this. Collective."""
        received = self.fetch(pipe.comm, found, here, pipe.variants, pipe.plan.layout)
        here.clear()
        pipe.variants.source.begin_from(received)
        pipe.build()
        pipe.trainer.tensors()  # reads the buffers that nothing has asked for
        received.let_go(pipe.variants.source.params)
        received.once = True  # the optimizer's state
        pipe.trainer.resume(received, described(found.numbers))
        pipe.variants.source.begin_from(self._initial)
        pipe.steps_done = found.key.step

    def fetch(
        self, comm: Communicator, found: Found, here: Mapping[str, Tensor], variants: Variants, layout: Layout
    ) -> Received:
        """What this rank needs of a version. Collective."""
        return fetch(comm, here, found, needed(found.specs, variants, layout, comm.rank))

    def _begin_anew(self, pipe: Pipeline) -> None:
        """The first version of new mirrors is made now, and the old ones go when it is whole everywhere.
        Collective."""
        comm, layout = pipe.comm, pipe.plan.layout
        _expect_with(pipe, pipe.costs)
        mirrored = layout.mirror_every and comm.size > 1
        if mirrored:
            mirrors = Mirrors(comm, layout.mirror_every, pipe.plan.hash)
            self._kept.append(mirrors)
            _take(mirrors, pipe.steps_done, pipe.trainer)
            mirrors.commit()
        self._kept = self._kept[-1:] if mirrored else []


def _expect_with(pipe: Pipeline, costs: Costs) -> None:
    """Costs of other speeds, and what a step of the plan takes with them."""
    pipe.costs, pipe.predicted = costs, expect(costs, pipe.plan.layout, pipe.program)[1]


def _take(mirrors: Mirrors, step: int, trainer: Trainer) -> None:
    mirrors.take(step, trainer.tensors(), trainer.optimizer_numbers())


def needed(names: Iterable[str], variants: Variants, layout: Layout, rank: int) -> set[str]:
    """Weights that the stages of a rank own or read, optimizer state of those that their copies update."""
    mine, owner = layout.stages_on(rank), variants.stage_of_param(layout.cuts)
    codes = (variants.code("train", variants.first, layout.cuts, stage) for stage in mine)
    read = {name for name, stage in owner.items() if stage in mine}
    read |= {name for code in codes for name, _ in code.leaves}
    updated = set[str]()
    for stage in mine:
        ranks = layout.ranks[stage]
        by = updates_of(variants.source, variants.graph, stage, owner, variants.trained, len(ranks))
        updated |= {name for name, copy in by.items() if ranks[copy] == rank}
    return {name for name in names if name in read or name.rpartition("/")[0] in updated}


def _check(variants: Variants, plan: Plan, comm: Communicator) -> None:
    """What would be refused when the trainer of the plan is built, or later, while there still is another.
    Raises MpipipeError."""
    graph, layout = variants.graph, plan.layout
    variants.check(layout.cuts, layout.stages_on(comm.rank))
    check_tags(comm, program_for(layout, plan.numerics, graph.ties, graph.groups))


def _slower(planned: Timeline, took: Timeline) -> str:
    """Of the rank that took longest beside what was planned, compared with the others, if it is slow: planned
    around now, it would not be noticed any more."""
    factors = compared([s / (of or 1.0) for s, of in zip(busy_s(took), busy_s(planned), strict=True)])
    slowest = max(range(len(factors)), key=lambda rank: factors[rank])
    if factors[slowest] <= FACTOR:
        return ""
    return f"; rank {slowest} took {factors[slowest]:.1f} times as long as planned, beside the others"
