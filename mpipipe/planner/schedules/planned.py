"""Zero-bubble schedules for real costs and a memory limit (Qi et al. 2023, section 3.1), on any placement.

The hand-made ones are right where F, I and W take equally long. Here the order follows from the times of the
stages, by list scheduling (`listed`): all of `policies` are played through with these times. The first stage
does its backward in one where that is shorter: nobody waits for its gradient. Others do where it makes the
step shorter (`merged`). The shortest of these, and of those by hand that fit, is the answer; that none is
shorter is not claimed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from mpipipe.errors import PlanError
from mpipipe.planner.schedules.fill import Use, Work, seconds, units
from mpipipe.planner.schedules.listed import Policy, listed, listed_seconds
from mpipipe.planner.schedules.merged import merged, saved_s
from mpipipe.planner.schedules.orders import live_stages, one_each, two_each, v_shaped, wrapped
from mpipipe.planner.schedules.v_shape import zb_v
from mpipipe.planner.schedules.zero_bubble import zb_h1, zb_h2
from mpipipe.planner.sizes import size_text
from mpipipe.planner.stages import blocks_ahead, calls
from mpipipe.values import Schedule, StageCost

GAPS = (0.0, 0.5, 1.0)  # of a W; a wait that is shorter is left empty
# Of as many stashes as there are stages, those of zb-h1 and zb-v. Slow messages want many.
_SHARES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0)
_MOST_MERGED = 8  # orders of a room whose backwards are merged
_MERGED = 1 << 18  # actions that are walked to merge those of an order, each half at two places
Found = tuple[Schedule, float]


def zb_planned(
    stages: Sequence[StageCost],
    n_micro: int,
    memory_bytes: Sequence[int],
    act_s: Sequence[float] = (),
    grad_s: Sequence[float] = (),
    receive_window: int = 4,
    rank_of_stage: Sequence[int] = (),
    tied: Sequence[Use] = (),
) -> Schedule:
    """The shortest for costs of each stage.

    memory_bytes: of each rank, for all that `StageCost` counts and the receive buffers. act_s, grad_s:
    seconds of one message from each stage to the next one, and to the one before; () = nothing.
    rank_of_stage: () = stage s on rank s. tied: of uses of a parameter whose gradients meet in each
    micro-batch, stage of a user, stage of its owner, seconds of one message. Raises PlanError where a rank
    cannot hold one micro-batch of each of its stages, or these do not fit each other.
    """
    on = tuple(rank_of_stage) or tuple(range(len(stages)))
    _check_sizes(on, len(stages), n_micro, len(memory_bytes), act_s, grad_s, tied)
    most = room_for(on, stages, n_micro, memory_bytes, receive_window)
    found = planned_by_room(on, n_micro, work_of(on, stages, act_s, grad_s, tied), most)
    return min(found, key=lambda found: (found[1], sum(live_stages(found[0]))))[0]


def _check_sizes(
    on: Sequence[int], n_stages: int, n_micro: int, n_memories: int, act_s: Sequence[float],
    grad_s: Sequence[float], tied: Sequence[Use],
) -> None:  # fmt: skip
    """Compiled code, which looks nothing up twice, takes them for what they are said to be."""
    if n_stages < 1 or n_micro < 1:
        raise PlanError(f"{n_stages} stages and {n_micro} micro-batches; both must be at least 1")
    if len(on) != n_stages or {*on} != {*range(len({*on}))}:
        raise PlanError(f"rank_of_stage = {list(on)} for {n_stages} stages; give each a rank of 0, 1, ...")
    if n_memories <= max(on):
        raise PlanError(f"memory_bytes of {n_memories} ranks for {max(on) + 1}; give one for each rank")
    for name, seconds_of in (("act_s", act_s), ("grad_s", grad_s)):
        if len(seconds_of) not in (0, n_stages):
            raise PlanError(f"{name} of {len(seconds_of)} stages for {n_stages}; give one for each, or none")
    for user, owner, _ in tied:
        if not {user, owner} <= {*range(n_stages)}:
            raise PlanError(f"tied: stages {user} and {owner} of {n_stages}; number them from 0")


def planned_by_room(
    on: Sequence[int], n_micro: int, work: Work, most: Sequence[int], with_hand: bool = True
) -> list[Found]:
    """As `zb_planned`, the shortest for each room for stashes, ascending, and its seconds; and those by hand,
    where there is one stage per rank. on: the rank of each stage; most: stashes that each rank can keep."""
    found, done = list[Found](), dict[bytes, Found]()
    for _, alike in itertools.groupby(policies(on, n_micro, most), key=lambda of: of.room):
        shortest = _shortest(on, n_micro, work, list(alike), done)
        if shortest is not None:
            found.append(shortest)
    if with_hand and len(set(on)) == len(on):
        for made in (zb_h1(len(on), n_micro), zb_h2(len(on), n_micro)):
            fits = all(live <= has for live, has in zip(live_stages(made), most, strict=True))
            if fits and (whole_s := seconds(made, work)) < math.inf:
                found.append((made, whole_s))
    return found


def _shortest(
    on: Sequence[int], n_micro: int, work: Work, tried: Sequence[Policy], done: dict[bytes, Found]
) -> Found | None:
    """With backwards merged, of a few that should be shortest: a longer one may have more to merge, but no
    more is hoped for than a rank saves with all of its backwards in one. done: of other rooms, too."""
    of_rank = [0.0] * (max(on) + 1)
    for rank, saved in zip(on, saved_s(work), strict=True):
        of_rank[rank] += n_micro * saved
    took_s = listed_seconds(on, n_micro, work, tried)
    made = dict[bytes, Found]()
    for i in sorted(range(len(tried)), key=took_s.__getitem__):
        least_s = min((of_order_s for _, of_order_s in made.values()), default=math.inf)
        if len(made) == _MOST_MERGED or took_s[i] - max(of_rank) >= least_s or took_s[i] == math.inf:
            break
        order = listed(on, n_micro, work, tried[i])
        codes = b"".join(code.tobytes() for code in order.codes)
        if codes not in done:
            done[codes] = merged(order, work, _MERGED // (2 * sum(map(len, order.codes))))
        made[codes] = done[codes]
    return min(made.values(), key=lambda found: found[1], default=None)


def work_of(
    on: Sequence[int], stages: Sequence[StageCost], act_s: Sequence[float] = (),
    grad_s: Sequence[float] = (), tied: Sequence[Use] = (),
) -> Work:  # fmt: skip
    """What the actions of these stages take, with the calls that they and their messages are. tied: as of
    `zb_planned`."""
    each, none = list(zip(stages, calls(on), strict=True)), (0.0,) * len(stages)
    return Work(
        fwd_s=tuple(s.fwd_s + n * s.call_s for s, n in each),
        bwd_input_s=tuple(s.bwd_input_s + n * s.call_s for s, n in each),
        bwd_weight_s=tuple(s.bwd_weight_s + s.split_s + s.call_s for s in stages),
        bwd_s=tuple(s.bwd_input_s + n * s.call_s + s.bwd_weight_s for s, n in each),
        act_s=tuple(act_s) or none,
        grad_s=tuple(grad_s) or none,
        tied=tuple(tied),
    )


def policies(on: Sequence[int], n_micro: int, most: Sequence[int]) -> Iterator[Policy]:
    """All that are tried, by room, ascending. most: stashes that each rank can keep."""
    each = max(Counter(on).values())
    for room in _rooms(on, n_micro, most):
        for forwards, last, whole, gap in itertools.product(
            (True, False), (True, False)[:each], (False, True), GAPS
        ):
            yield Policy(forwards, last, whole, gap, room)


def _rooms(on: Sequence[int], n_micro: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Stashes that each rank may keep, ascending: all of them equally many, as far as they go."""
    n_stages, each = len(on), max(Counter(on).values())
    all_of_them = each * n_micro
    shares = {math.ceil(share * n_stages) for share in _SHARES} | {n_stages + 1, n_stages + 2, all_of_them}
    wished = sorted({min(max(share, each), all_of_them) for share in shares})
    yield from dict.fromkeys(tuple(min(has, wish) for has in most) for wish in wished)


def room_for(
    on: Sequence[int], stages: Sequence[StageCost], n_micro: int, memory_bytes: Sequence[int],
    receive_window: int, turns: Sequence[int] = (),
) -> list[int]:  # fmt: skip
    """By rank, stashes that fit for certain; each as large as that of the rank's largest stage. turns: as of
    `Work.in_turn`, for each of which it has as many; () = one. Raises PlanError where that is not one of each
    of its stages."""
    of_rank = dict(zip(on, turns or (1,) * len(on), strict=True))
    return [
        _room_of(rank, on, stages, n_micro, has, min(receive_window, n_micro * of_rank[rank]), of_rank[rank])
        for rank, has in enumerate(memory_bytes[: max(on) + 1])
    ]


def _room_of(
    rank: int, on: Sequence[int], stages: Sequence[StageCost], n_micro: int, has: int, ahead: int, turns: int
) -> int:
    """Each stash may have to hold what waits for its W, with the gradient that it was given. What is made
    again of one is there once."""
    each = fixed = messages = workspace = in_two = remade = 0
    own = [s for s, where in enumerate(on) if where == rank]
    for s in own:
        stage, act = stages[s], stages[s - 1].act_bytes if s else 0
        grad = stages[s + 1].grad_bytes if s + 1 < len(stages) else 0
        waiting = stage.waiting_bytes + max(0, act - stage.waiting_received_bytes)  # and its buffer
        each = max(each, max(stage.stash_bytes, waiting) + grad)
        fixed += stage.fixed_bytes
        received = act * (s - 1 not in own) + grad * (s + 1 not in own)
        messages += ahead * received + max(stage.act_bytes, stage.grad_bytes)
        workspace, remade = max(workspace, stage.workspace_bytes), max(remade, stage.remade_bytes)
        in_two = max(in_two, stage.in_two_bytes - stage.at_work_bytes)
    left = has - fixed - workspace - remade - messages - in_two

    def needs(room: int) -> int:
        of_blocks = (
            int(blocks_ahead(room - 1, n_micro, max(1, stages[s].blocks // turns))) * stages[s].at_once_bytes
            for s in own
        )
        return turns * (room * each + sum(of_blocks))

    if left < needs(len(own)):
        least = has - left + needs(len(own))
        raise PlanError(
            f"rank {rank} has {size_text(has)}, and needs {size_text(least)} for one micro-batch; "
            "use smaller micro-batches, or more ranks"
        )
    room = n_micro * len(own)
    room = min(room, left // (turns * each)) if each else room
    while needs(room) > left:
        room -= 1
    return room


# -- by name -------------------------------------------------------------------------------------


def homes_of(name: str, n_ranks: int) -> tuple[int, ...]:
    """The rank of each stage, whatever the order."""
    if name == "zb-planned":
        return tuple(range(n_ranks))
    return v_shaped(n_ranks) if name == "v-planned" else wrapped(2 * n_ranks, n_ranks)


def zb_planned_even(n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
    """While no costs are known: F, I and W of all stages take equally long, messages nothing, and there is
    memory for as many stashes as zb-h1 keeps. Raises PlanError for several stages per rank."""
    one_each("zb-planned", n_stages, n_ranks)
    return _even(range(n_stages), n_micro)


def v_planned_even(n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
    """Likewise, two stages per rank in a V, as zb-v has them, and as many stashes."""
    planned = _even(v_shaped(two_each("v-planned", n_stages, n_ranks)), n_micro)
    return min(planned, zb_v(n_stages, n_micro, n_ranks), key=lambda made: seconds(made, units(n_stages)))


def interleaved_planned_even(n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
    """Likewise, two stages per rank, round after round, as interleaved has them."""
    ranks = two_each("interleaved-planned", n_stages, n_ranks)
    return _even(wrapped(n_stages, ranks), n_micro)


def _even(rank_of_stage: Sequence[int], n_micro: int) -> Schedule:
    even = StageCost(1.0, 1.0, 1.0, 0.0, 0, 1, 0, 0, 0)
    n_stages, n_ranks = len(rank_of_stage), max(rank_of_stage) + 1
    return zb_planned([even] * n_stages, n_micro, [n_stages] * n_ranks, rank_of_stage=rank_of_stage)
