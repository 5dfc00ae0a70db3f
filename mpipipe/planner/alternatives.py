"""Why not another plan? The next best ones, simulated with the same costs, and what each of them loses.

Alternatives with other cuts, another schedule or another number of ranks keep the batch. Those with another
number of micro-batches keep the size of one, so the batch changes and time is compared per sample; but where
their number was searched, they are those of the search, and keep the batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner.copies import Copies, legal_copies, most_copies, replicas_text, shape_of
from mpipipe.planner.joint import SKIPPED, Tried, least_s, most_compared
from mpipipe.planner.more_copies import more_copies
from mpipipe.planner.orders import Orders
from mpipipe.planner.partition import Wish
from mpipipe.planner.prediction import expect_with, too_full
from mpipipe.planner.problem import ENDLESS
from mpipipe.planner.programs import cut_indices, with_window
from mpipipe.planner.schedules import PLAIN, PLANNED, SCHEDULES, stages_on
from mpipipe.planner.search import REFINE_WORK, make_plan
from mpipipe.planner.sizes import counted, size_text
from mpipipe.planner.stages import Cuts, Ranges, in_order, neighbours, stage_costs
from mpipipe.planner.uneven import promising_shapes
from mpipipe.values import RECOMPUTE, Cluster, Costs, Numerics, Plan, Prediction, Program, Value

_BLOCK = re.compile(r"^(.*?\.)??(\d+)[./]")  # "layers.3.mlp/mul.0": block 3 of "layers."
_NO_BYTES = 0.0005  # of a rank's peak: what differs by less rounds to 0.0 %
_SAID = 0.02  # by which computing may differ before it is said
MOST_NUMBERS = 5  # of micro-batches, where they were searched: rows


@dataclass(frozen=True)
class Alternative(Value):
    name: str
    step_s: float | None  # None: it does not fit, or cannot be made
    loss: float | None  # seconds per sample over the plan's, less 1; below 0 it gains
    why: str


def alternatives(
    plan: Plan,
    costs: Costs,
    cluster_of: Callable[[int], Cluster],
    tried: Sequence[Tried] = (),
    recompute: Wish = "none",
) -> tuple[Alternative, ...]:
    """cluster_of(ranks): the cluster with another number of ranks; raises PlanError where it has too few.
    tried: what the plan was chosen from, where it was. recompute: as asked for the plan."""
    chosen = len({t.schedule for t in tried}) > 1
    return tuple(_Asked(plan, costs, cluster_of, recompute, chosen).all(tried))


class _Asked:
    def __init__(
        self, plan: Plan, costs: Costs, cluster_of: Callable[[int], Cluster],
        recompute: Wish, chosen: bool,
    ) -> None:  # fmt: skip
        self.recompute, self.chosen = recompute, chosen  # chosen: the schedule was
        self.plan, self.costs, self.names, self.cluster_of = plan, costs, costs.names, cluster_of
        self.cuts = cut_indices(plan.layout, self.names)
        self.n_ranks, self.n_stages = plan.layout.n_ranks, plan.layout.n_stages
        self.n_copies, self.n_each = plan.layout.n_copies, plan.layout.ranks_per_copy
        self.shape = shape_of(plan.layout)
        self._programs: dict[tuple[str, int], Program] = {}

    def all(self, tried: Sequence[Tried]) -> Iterator[Alternative]:
        if self.n_each > 1:
            yield from self._other_cuts()
            yield from self._other_schedules(tried)
        yield from self._other_copies()
        yield from self._more_copies()
        yield from self._other_modes()
        searched = len({t.micro_batches for t in tried}) > 1
        yield from self._searched(tried) if searched else self._micro_batches()
        yield from self._ranks()

    # -- other cuts -------------------------------------------------------------------------------

    def _other_cuts(self) -> Iterator[Alternative]:
        """The next best one and those that a person would make by hand; one row where they are the same."""
        rules = {"next best cut": self._next_best(), "equal numbers of groups": self._equal_groups(),
                 "equal numbers of layers": self._equal_layers()}  # fmt: skip
        names: dict[Cuts, list[str]] = {}
        for name, cuts in rules.items():
            if cuts is not None:
                names.setdefault(cuts, []).append(name)
        for cuts, called in names.items():
            name = "; ".join(called)
            if cuts == self.cuts:
                yield Alternative(name, self.plan.prediction.step_s, 0.0, "is this plan")
            else:
                yield self._same_numerics(name, cuts)

    def _next_best(self) -> Cuts | None:
        """The best of those with one cut moved by one group; None where none fits."""
        near = neighbours(len(self.names), self.cuts)
        if self.n_stages * self.plan.numerics.micro_batches > REFINE_WORK:  # without simulating each of them
            near = [min(near, key=self._slowest())] if near else []
        tried = [(self._expected(cuts), cuts) for _, cuts in near]
        made = [(p, cuts) for p, cuts in tried if isinstance(p, Prediction)]
        fits = [(p.step_s, cuts) for p, cuts in made if too_full(p.peak_bytes, self.costs.cluster) is None]
        return min(fits)[1] if fits else None

    def _slowest(self) -> Callable[[tuple[int, Cuts]], tuple[float, float]]:
        """For one of the `neighbours`: the slowest stage, and the sum of squares less that of now."""
        placed, now = in_order(self.costs, self.plan.layout.order), self._stage_s(self.cuts)
        ranges, devices, modes = Ranges(placed), placed.cluster.devices, self.plan.layout.modes
        order = np.argsort(-now)[:3].tolist()  # a cut changes two stages
        turns = self.plan.layout.turns

        def key(near: tuple[int, Cuts]) -> tuple[float, float]:
            i, cuts = near
            edges = (0, *cuts, len(self.names))
            two = [
                float(ranges.ending_at(edges[s + 1], edges[s], modes[s]).seconds[0])
                * turns[s]
                / devices[s].speed
                for s in (i, i + 1)
            ]
            rest = max((float(now[s]) for s in order if s not in (i, i + 1)), default=0.0)
            return max(*two, rest), sum(t * t for t in two) - float((now[i : i + 2] ** 2).sum())

        return key

    def _stage_s(self, cuts: Cuts) -> np.ndarray:
        layout = self.plan.layout
        stages = stage_costs(in_order(self.costs, layout.order), cuts, layout.recompute)
        return np.array([stage.seconds * n for stage, n in zip(stages, layout.turns, strict=True)])

    def _equal_groups(self) -> Cuts | None:
        n = len(self.names)
        return (
            tuple(stage * n // self.n_stages for stage in range(1, self.n_stages))
            if n >= self.n_stages
            else None
        )

    def _equal_layers(self) -> Cuts | None:
        """Numbered blocks shared out evenly, what is before and after them on the first and last stage; None
        where there are too few."""
        found = [_BLOCK.match(name) for name in self.names]
        blocks = [f.group(0)[:-1] if f else "" for f in found]
        starts = [i for i, b in enumerate(blocks) if b and b != (blocks[i - 1] if i else "")]
        starts = [i for k, i in enumerate(starts) if blocks[i] not in {blocks[j] for j in starts[:k]}]
        if len(starts) < self.n_stages:
            return None
        return tuple(starts[stage * len(starts) // self.n_stages] for stage in range(1, self.n_stages))

    # -- other settings ---------------------------------------------------------------------------

    def _other_schedules(self, tried: Sequence[Tried]) -> Iterator[Alternative]:
        """What was tried; else with the cuts of now where it has as many stages per rank, or with those that
        suit it."""
        count = self.plan.numerics.micro_batches
        known = {t.schedule: t for t in tried if (t.micro_batches, t.copies) == (count, self.shape)}
        for schedule in SCHEDULES:
            if schedule == self.plan.layout.schedule:
                continue
            same = stages_on(schedule, self.n_each) == self.n_stages == self.n_each
            found = known.get(schedule)
            if found and (found.made or found.bound_s is not None or not same):
                yield self._tried(f"schedule {schedule}", found)
            elif self.n_each * count // self.n_copies > most_compared(schedule):
                yield Alternative(f"schedule {schedule}", None, None, f"{SKIPPED}{schedule}")
            elif same and schedule not in PLANNED:
                yield self._same_numerics(f"schedule {schedule}", self.cuts, schedule)
            else:
                yield self._planned_with(f"schedule {schedule}", schedule, self.shape)

    def _tried(self, name: str, t: Tried) -> Alternative:
        ours = self.plan.prediction.step_s
        if t.made is not None:
            why = self._work_and_memory(t.made[0].prediction)
            return Alternative(name, t.step_s, t.step_s / ours - 1.0, why)
        if t.bound_s is None or t.skipped:
            return Alternative(name, None, None, t.why if t.skipped else first_sentence(t.why))
        return Alternative(name, None, None, f"{t.bound_s / ours - 1.0:+.1%} at least; {t.why}")

    def _other_copies(self) -> Iterator[Alternative]:
        """All even numbers, and of unlike ones those that promise most."""
        numerics, schedule = self.plan.numerics, self.plan.layout.schedule
        for copies in legal_copies(numerics):
            if copies != self.shape and self.n_ranks % copies == 0:
                yield self._planned_with(replicas_text(copies), schedule, copies)
        for shape in promising_shapes(self.costs, numerics, self.n_ranks)[:1]:
            if shape != self.shape:
                yield self._planned_with(replicas_text(shape), schedule, shape)

    def _more_copies(self) -> Iterator[Alternative]:
        """Where more blocks would allow them, and they would be faster."""
        if found := more_copies(self.plan, self.costs, self.recompute):
            other = f"{found.schedule}, " if found.schedule != self.plan.layout.schedule else ""
            why = f"with {found.how}; {other}"
            name, batch = replicas_text(found.copies), self.plan.numerics.batch
            yield self._judged(name, found.prediction, batch, lambda p: why + self._work(p))

    def _planned_with(self, name: str, schedule: str, copies: Copies) -> Alternative:
        window = self.plan.layout.receive_window
        try:
            p = make_plan(
                self.costs, self.plan.numerics, schedule, window, self.n_ranks, copies,
                self.recompute,
            )[0].prediction  # fmt: skip
        except (PlanError, DeadlockError) as error:
            return Alternative(name, None, None, first_sentence(error))
        return self._judged(name, p, self.plan.numerics.batch, self._work)

    def _other_modes(self) -> Iterator[Alternative]:
        """Of a plan that recomputes somewhere: the same mode on all stages."""
        layout = self.plan.layout
        for mode in RECOMPUTE if layout.recompute else ():
            if set(layout.modes) != {mode}:
                yield self._same_numerics(f"recompute {mode}", self.cuts, recompute=mode)

    def _micro_batches(self) -> Iterator[Alternative]:
        n = self.plan.numerics
        for count in (n.micro_batches // 2, n.micro_batches * 2):
            if count < self.n_copies or (n.reduce == "exact" and count % self.n_copies):
                continue
            batch = n.batch * count // n.micro_batches
            blocks = self.n_copies if n.reduce == "exact" else 1
            numerics = replace(n, micro_batches=count, batch=batch, blocks=blocks)
            p = self._expected(self.cuts, numerics=numerics)
            name = f"{count} micro-batch{'es' * (count > 1)}, batch {numerics.batch}"
            yield self._judged(name, p, numerics.batch, lambda p: f"per sample; {self._idle(p)}")

    def _searched(self, tried: Sequence[Tried]) -> Iterator[Alternative]:
        """The best of the other numbers of micro-batches, and the largest of those that do not fit."""
        by_count: dict[int, list[Tried]] = {}
        for t in tried:
            if t.micro_batches != self.plan.numerics.micro_batches:
                by_count.setdefault(t.micro_batches, []).append(t)
        best = sorted((min(ts, key=least_s) for ts in by_count.values()), key=least_s)
        fits = [t for t in best if t.bound_s is not None]
        misfits = sorted((t for t in best if t.bound_s is None), key=lambda t: t.micro_batch)
        for t in [*fits[:MOST_NUMBERS], *misfits[:1]]:
            yield self._number(t)

    def _number(self, t: Tried) -> Alternative:
        if t.made is None:
            return self._tried(t.in_words, t)
        other = f"{t.schedule}, " if t.schedule != self.plan.layout.schedule else ""
        other += f"{replicas_text(t.copies)}, " if t.copies != self.shape else ""
        loss = t.step_s / self.plan.prediction.step_s - 1.0
        return Alternative(t.in_words, t.step_s, loss, other + self._work(t.made[0].prediction))

    def _ranks(self) -> Iterator[Alternative]:
        for ranks in (self.n_ranks // 2, 2 * self.n_ranks):
            if not 1 <= ranks <= len(self.names) * most_copies(self.shape):
                continue
            name = counted(ranks, "rank")
            try:
                schedule, p = self._planned_on(self.cluster_of(ranks))
            except (PlanError, DeadlockError) as error:
                why = why_no_plan(lambda on: self._planned_on(on)[1], self.cluster_of, ranks, error)
                yield Alternative(name, None, None, why)
                continue
            other = f"{schedule}, " if schedule != self.plan.layout.schedule else ""
            why = f"{other}{self.plan.prediction.step_s / p.step_s:.2f} times as fast, bubble {p.bubble:.1%}"
            yield Alternative(name, p.step_s, p.step_s / self.plan.prediction.step_s - 1.0, why)

    def _planned_on(self, cluster: Cluster) -> tuple[str, Prediction]:
        """With the schedule of the plan; where that was chosen, and does not fit there, with 1f1b."""
        layout, costs = self.plan.layout, self.costs.but(cluster=cluster)
        n_ranks, numerics = len(cluster.devices), self.plan.numerics
        copies = max(n for n in legal_copies(numerics) if n <= most_copies(self.shape) and n_ranks % n == 0)
        *chosen, last = dict.fromkeys((layout.schedule, PLAIN[0] if self.chosen else layout.schedule))
        how = layout.receive_window, n_ranks, copies, self.recompute
        for schedule in chosen:
            with suppress(PlanError, DeadlockError):
                return schedule, make_plan(costs, numerics, schedule, *how, quick=True)[0].prediction
        return last, make_plan(costs, numerics, last, *how)[0].prediction

    # -- what they are worth ------------------------------------------------------------------------

    def _expected(
        self, cuts: Cuts, schedule: str | None = None, numerics: Numerics | None = None,
        recompute: Wish | None = None,
    ) -> Prediction | str:  # fmt: skip
        """The reason where it cannot be made, as by a schedule of the user's that refuses other numbers."""
        try:
            return self._predicted(cuts, schedule, numerics, recompute or self.recompute)
        except (PlanError, DeadlockError) as error:
            return first_sentence(error)

    def _predicted(
        self, cuts: Cuts, schedule: str | None, numerics: Numerics | None, recompute: Wish
    ) -> Prediction:
        numerics, old = numerics or self.plan.numerics, self.plan.layout
        same_order = schedule is None and numerics == self.plan.numerics
        layout = replace(
            old, cuts=tuple(self.names[c] for c in cuts), schedule=schedule or old.schedule,
            actions=old.actions if same_order else (),
        )  # fmt: skip
        if layout.schedule in PLANNED and not same_order:
            layout = replace(
                layout, actions=next(Orders(self.costs, layout, numerics).shortest(cuts)).actions
            )
        key = layout.schedule, numerics.micro_batches
        if self.costs.ties or key not in self._programs:  # by ties alone the order depends on cuts
            self._programs[key] = with_window(layout, numerics, self.costs.ties, self.names)[1]
        program = self._programs[key]
        layout = replace(layout, receive_window=program.receive_window)
        bound_s = self.plan.prediction.lower_bound_s
        return expect_with(recompute, self.costs, layout, program, bound_s)[1]

    def _same_numerics(
        self, name: str, cuts: Cuts, schedule: str | None = None, recompute: Wish | None = None
    ) -> Alternative:
        p = self._expected(cuts, schedule, recompute=recompute)
        return self._judged(name, p, self.plan.numerics.batch, lambda p: self._reason(cuts, p))

    def _judged(
        self, name: str, p: Prediction | str, batch: int, why: Callable[[Prediction], str]
    ) -> Alternative:
        if isinstance(p, str):
            return Alternative(name, None, None, p)
        full = too_full(p.peak_bytes, self.costs.cluster)
        if full is not None:
            rank, short = full
            return Alternative(name, None, None, f"rank {rank} lacks {size_text(short)} of memory")
        ours = self.plan.prediction.step_s / self.plan.numerics.batch
        return Alternative(name, p.step_s, p.step_s / batch / ours - 1.0, why(p))

    def _reason(self, cuts: Cuts, p: Prediction) -> str:
        """The largest difference that a person would look for: the slowest stage, else the memory."""
        before, now = self._stage_s(self.cuts), self._stage_s(cuts)
        slow = int(now.argmax())
        if now[slow] > before.max() * (1 + 1e-6):
            return f"slowest stage: {slow} with {now[slow] * 1e3:.5g} ms, now {before.max() * 1e3:.5g}"
        return f"{'no stage is slower; ' if cuts != self.cuts else ''}{self._work_and_memory(p)}"

    def _work_and_memory(self, p: Prediction) -> str:
        peaks = np.array(self.plan.prediction.peak_bytes)
        grown = np.array(p.peak_bytes) - peaks
        rank = int(np.abs(grown).argmax())
        if abs(grown[rank]) <= _NO_BYTES * peaks[rank]:
            return self._work(p)
        more = f"{'+' if grown[rank] >= 0 else '-'}{size_text(abs(int(grown[rank])))}"
        return f"{self._work(p)}; memory of rank {rank} {more}"

    def _work(self, p: Prediction) -> str:
        """With what ranks compute, where that differs: as by backwards in two, or smaller micro-batches."""
        computing_s, now_s = (of.step_s * (1.0 - of.bubble) for of in (p, self.plan.prediction))
        known = now_s > 0.0 and not self.plan.layout.mirror_every  # mirrors are in the step of the plan alone
        more = computing_s / now_s - 1.0 if known else 0.0
        return f"computes {more:+.1%}; {self._idle(p)}" if abs(more) > _SAID else self._idle(p)

    def _idle(self, p: Prediction) -> str:
        return f"bubble {p.bubble:.1%}, now {self.plan.prediction.bubble:.1%}"


def first_sentence(error: Exception | str) -> str:
    return re.split(r"[;\n]", str(error))[0]


def why_no_plan(
    planned: Callable[[Cluster], Prediction],
    cluster_of: Callable[[int], Cluster],
    ranks: int,
    error: PlanError | DeadlockError,
) -> str:
    """What the fastest cut would lack; the error itself where it is not memory. planned: raises as
    `make_plan` does."""
    try:
        cluster = cluster_of(ranks)
        endless = tuple(replace(d, memory_bytes=ENDLESS) for d in cluster.devices)
        full = too_full(planned(replace(cluster, devices=endless)).peak_bytes, cluster)
    except (PlanError, DeadlockError):
        full = None
    if full is None:
        return first_sentence(error)
    return f"no cut fits; with the fastest, rank {full[0]} lacks {size_text(full[1])} of memory"
