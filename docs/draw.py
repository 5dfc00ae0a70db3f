"""The drawings of docs/concepts.md and docs/schedules.md, made by the planner and simulator that a run uses.

    python docs/draw.py      writes docs/images/*.png and the drawn blocks of both pages anew

The costs are made up, the cuts, the orders and the times are not: `drawings` has the text of each block that
the page marks with `<!-- drawn: NAME -->`, and tests/docs/test_docs.py compares.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from mpipipe.errors import DeadlockError
from mpipipe.planner import (
    SCHEDULES,
    forward_only,
    live_micro_batches,
    lower,
    partition,
    predict,
    program_for,
    prove,
    simulate,
)  # fmt: skip
from mpipipe.planner.schedules import PLANNED, live_stages, zb_planned
from mpipipe.report.draw import draw_png, draw_text
from mpipipe.values import (
    Cluster,
    Costs,
    Device,
    GroupCost,
    Layout,
    Link,
    Numerics,
    Schedule,
    StageCost,
    Timeline,
)  # fmt: skip

HERE = Path(__file__).parent
MIB = 1 << 20
BLOCKS = {f"{kind}{i}": ms for i in range(4) for kind, ms in (("attn", 3), ("mlp", 5))}
MODEL = {"embedding": 1, **BLOCKS, "head": 9}  # group -> milliseconds of its forward
RANKS, MICRO = 4, 8
UNLIKE = ((1, 2, 1), (2, 3, 2), (2, 3, 2), (3, 3, 2))  # of each rank, units of F, I and W
KEPT = 5  # stashes that a rank has memory for, where the order is planned


def costs(forward_ms: Sequence[float], messages: bool) -> Costs:
    """Groups whose backward takes twice their forward; without `messages`, links and update cost nothing."""
    groups = tuple(
        GroupCost(f"group{i}", ms / 1e3, ms / 1e3, ms / 1e3, param_bytes=int(ms) * MIB, stash_bytes=8 * MIB,
                  workspace_bytes=0, act_bytes=MIB, grad_bytes=MIB)
        for i, ms in enumerate(forward_ms)
    )  # fmt: skip
    link = Link(2e-6, 9e9) if messages else Link(0.0, 1e30)
    ranks = (Device("cpu", speed=1.0, memory_bytes=1 << 40, threads=1),) * RANKS
    return Costs(groups, Cluster(ranks, (0,) * RANKS, {"node": link}), ties=(), bytes_per_param_byte=4.0,
                 step_s_per_byte=1e-10 if messages else 0.0, source="modelled", spread=0.0)  # fmt: skip


def simulated(found: Costs, cuts: Sequence[int], schedule: str, micro: int = MICRO) -> Timeline:
    """One step with these cuts."""
    numerics = Numerics(batch=micro, micro_batch=1, micro_batches=micro, blocks=1, threads=1, bits="torch",
                        gemm="mkl", precision="fp32", tied="per_use", op_table={}, torch="",
                        instruction_set="", seed=0)  # fmt: skip
    names = found.names
    ranks = tuple((rank,) for rank in range(len(cuts) + 1))
    layout = Layout(tuple(names[cut] for cut in cuts), ranks, schedule, receive_window=4)
    return predict(found, layout, program_for(layout, numerics, (), names))[1]


def equal_stages(schedule: str, micro: int = MICRO) -> Timeline:
    return simulated(costs([10] * RANKS, messages=False), range(1, RANKS), schedule, micro)


def best_cuts() -> tuple[int, ...]:
    return partition(costs([*MODEL.values()], messages=True), MICRO, "1f1b", RANKS, 4, "per_use").cuts


def stages_text() -> str:
    """Two ways to cut the model: equally many groups, and the planner's."""
    names, ms = [*MODEL], [*MODEL.values()]
    equal = tuple(len(ms) * stage // RANKS for stage in range(1, RANKS))
    lines = []
    for title, cuts in (("equally many groups", equal), ("the planner's cuts", best_cuts())):
        step_s = simulated(costs(ms, messages=True), cuts, "1f1b").makespan_s
        lines.append(f"{title}: a step takes {step_s * 1e3:.0f} ms")
        for stage, (a, b) in enumerate(itertools.pairwise((0, *cuts, len(ms)))):
            lines.append(
                f"  stage {stage}  {'#' * sum(ms[a:b]):20} {sum(ms[a:b]):2} ms  {names[a]} ... {names[b - 1]}"
            )
    return "\n".join(lines)


def bubble_text() -> str:
    lines = [f"{'micro-batches':>13}  {'(S - 1) / (m + S - 1)':>21}  simulated, 1f1b  simulated, gpipe"]
    for micro in (4, 8, 16, 32):
        formula = (RANKS - 1) / (micro + RANKS - 1)
        found = [equal_stages(schedule, micro).bubble for schedule in ("1f1b", "gpipe")]
        lines.append(f"{micro:13}  {formula:21.1%}  {found[0]:15.1%}  {found[1]:16.1%}")
    return "\n".join(lines)


def memory_text() -> str:
    lines = [f"{'schedule':8}  " + "  ".join(f"stage {stage}" for stage in range(RANKS))]
    for schedule in ("1f1b", "gpipe"):
        live = live_micro_batches(SCHEDULES[schedule](RANKS, MICRO))
        lines.append(f"{schedule:8}  " + "  ".join(f"{n:7}" for n in live))
    return "\n".join(lines)


def order(name: str) -> Schedule:
    """A schedule on RANKS ranks."""
    several = len(SCHEDULES[name](2, 2).codes) == 1
    return SCHEDULES[name](2 * RANKS if several else RANKS, MICRO)


def stage_of(fwd: float, bwd_input: float, bwd_weight: float) -> StageCost:
    """In units; a stash takes one byte, all else nothing."""
    return StageCost(fwd, bwd_input, bwd_weight, 0.0, 0, 1, 0, 0, 0)


def in_units(schedule: Schedule, stages: Sequence[StageCost] = ()) -> Timeline:
    """Forward, input gradient and weight gradient of a rank's layers take 2 units each, which its stages
    share, if `stages` does not say otherwise; links and the update cost nothing."""
    share = 2 * RANKS / schedule.n_stages
    stages = tuple(stages) or (stage_of(share, share, share),) * schedule.n_stages
    ranks = (Device("cpu", 1.0, 1 << 40, 1),) * RANKS
    program = lower(schedule, (), "per_use", receive_window=4, train=False)
    return simulate(program, stages, Cluster(ranks, (0,) * RANKS, {"node": Link(0.0, 1e30)}))


def on_unlike(name: str) -> tuple[Schedule, Timeline]:
    """A schedule on ranks that are `UNLIKE`, whose stages share what a rank has; those that are planned with
    memory for `KEPT` stashes of a whole rank."""
    homes = order(name).rank_of_stage
    each = len(homes) // RANKS
    stages = [stage_of(*(units / each for units in UNLIKE[rank])) for rank in homes]
    made = order(name)
    if name in PLANNED:
        made = zb_planned(stages, MICRO, [KEPT * each] * RANKS, rank_of_stage=homes)
    return made, in_units(made, stages)


def unlike_text() -> str:
    rows = zip(("F", "I", "W"), zip(*UNLIKE, strict=True), strict=True)
    units = ", ".join(f"{kind} {' '.join(map(str, of_ranks))}" for kind, of_ranks in rows)
    lines = [f"units by rank: {units}", f"{'':19}  {'step':>4}  {'idle':>5}  stashes, by rank"]
    for name in SCHEDULES:
        made, timeline = on_unlike(name)
        each = made.n_stages // RANKS
        stashes = " ".join(f"{live / each:g}" for live in live_stages(made))
        lines.append(f"{name:19}  {timeline.makespan_s:4.0f}  {timeline.bubble:5.1%}  {stashes}")
    return "\n".join(lines)


def units_drawn() -> dict[str, Timeline]:
    """What is drawn in units, by name: each schedule, and forwards alone with its stages."""
    drawn = {name: in_units(order(name)) for name in SCHEDULES}
    drawn |= {name: on_unlike(name)[1] for name in PLANNED}
    for title, name in (("forward", "1f1b"), ("forward, V", "zb-v")):
        homes = order(name).rank_of_stage
        drawn[title] = in_units(forward_only(len(homes), MICRO, homes))
    return drawn


def unit_text(timeline: Timeline) -> str:
    """One unit is two columns; all drawings on one scale."""
    return draw_text(timeline, len("r0 |") + round(2 * timeline.makespan_s) + 1)


def least_window(schedule: Schedule) -> int:
    """Receives that each rank must post ahead so that the schedule is proved to end without any buffering."""
    for window in itertools.count(1):
        try:
            prove(lower(schedule, (), "per_use", window))
        except DeadlockError:
            continue
        return window
    raise AssertionError


def schedules_text() -> str:
    lines = [f"{'':19}  {'step':>4}  {'idle':>5}  {'idle, own span':>14}  {'stashes, by rank':20}  window"]
    for name in SCHEDULES:
        schedule = order(name)
        timeline, share = in_units(schedule), schedule.n_stages // RANKS
        stashes = " ".join(f"{live / share:g}" for live in live_stages(schedule))
        lines.append(
            f"{name:19}  {timeline.makespan_s:4.0f}  {timeline.bubble:5.1%}  {timeline.bubble_rank:14.1%}  "
            f"{stashes:20}  {least_window(schedule):6}"
        )
    return "\n".join(lines)


def drawings() -> dict[str, str]:
    """Block -> its text."""
    return {
        "stages": stages_text(),
        "gpipe": draw_text(equal_stages("gpipe")),
        "1f1b": draw_text(equal_stages("1f1b")),
        "bubble": bubble_text(),
        "memory": memory_text(),
        "schedules": schedules_text(),
        "unlike": unlike_text(),
        **{f"units {name}": unit_text(timeline) for name, timeline in units_drawn().items()},
    }


def main() -> None:
    drawn = drawings()
    for page in (HERE / "concepts.md", HERE / "schedules.md"):
        text = page.read_text()
        for name, made in drawn.items():
            block = re.compile(rf"(<!-- drawn: {name} -->\n```text\n).*?(```)", re.DOTALL)
            text = block.sub(lambda found, made=made: f"{found[1]}{made}\n{found[2]}", text)
        page.write_text(text)
    draw_png({name: equal_stages(name) for name in ("gpipe", "1f1b")}, HERE / "images" / "schedules.png")


if __name__ == "__main__":
    main()
