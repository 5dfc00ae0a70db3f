"""From a cut, stated in canonical names, to the code of one's own stage.

    Graph + cuts --stage_table--> {node name: stage} --stage_code--> Code

A stage is a pure function

    (received, batch inputs, parameter leaves, buffers, step, micro) -> (sent, statistics)

What is sent from stage s to s + 1 is decided by liveness: all that is made at or before s and used
after it, so a skip connection is relayed through the stages between. The table is made from the
training graph once and serves every variant (evaluation, ragged micro-batch, prediction). Where a variant
sends a view with gaps, which no cut does in the training graph, it is sent without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, fx
from torch._prims_common import is_non_overlapping_and_dense_or_false, make_contiguous_strides_for

from mpipipe.errors import PlanError
from mpipipe.graph.anatomy import Anatomy, needs_grad, spec_of
from mpipipe.graph.match import replace
from mpipipe.graph.rewrite import BufferUpdate
from mpipipe.values import Graph, TensorSpec

Leaf = tuple[str, int]  # (canonical parameter name, index of the group that uses it)
Homes = Mapping[str, tuple[bool, int]]  # parameter -> (whether training changes it, the stage that owns it)
NOWHERE: Homes = MappingProxyType({})


@dataclass(frozen=True)
class Port:
    """One tensor that crosses a cut, and its gradient that comes back; the strides of both are kept, because
    kernels (so bits) may depend on them. In messages it is dense."""

    name: str
    spec: TensorSpec
    stride: tuple[int, ...]
    needs_grad: bool
    grad_stride: tuple[int, ...]
    grad_uncut: tuple[int, ...] | None = None  # where nothing is cut, if a message cannot have them


@dataclass(frozen=True)
class Selective:
    """Of code that lets some results go (mpipipe.graph.recompute). refill: (arguments of `Code.forward`, its
    third result) -> nothing; it gives back their values to the first `dropped` of the latter."""

    refill: fx.GraphModule
    dropped: int
    inside_bytes: int  # of the dropped results that are not sent
    sent: tuple[int, ...]  # indices of what is sent and dropped, where that was asked for
    received: tuple[int, ...]  # indices of the received tensors that refill reads


@dataclass(frozen=True)
class Code:
    """A part of the graph as a function; arguments in the order of the fields."""

    forward: fx.GraphModule
    received: tuple[Port, ...]
    inputs: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    buffers: tuple[str, ...]
    random: bool  # whether step and micro are the last two arguments
    sent: tuple[Port, ...]
    updates: tuple[BufferUpdate, ...]  # one statistic each in the second result (None for counters)
    deferred: frozenset[Leaf] | None = None  # of a backward in two (mpipipe.graph.split)
    selective: Selective | None = None  # then forward has a third result


def stage_table(graph: Graph, cuts: Sequence[str]) -> dict[str, int]:
    """Node name -> stage. Raises PlanError if a cut is not the name of a group, or out of order."""
    starts = []
    for cut in cuts:
        if cut not in graph.groups:
            raise PlanError(
                f"the plan cuts before {cut!r}, but the model has no such group; its groups run from "
                f"{graph.groups[0]!r} to {graph.groups[-1]!r}: make the plan again for this model"
            )
        starts.append(graph.groups.index(cut))
    if starts != sorted(set(starts)) or 0 in starts:
        raise PlanError(
            f"the cuts of the plan are at groups {starts}; they must ascend and none may be the first group"
        )
    return {n.name: sum(start <= n.group for start in starts) for n in graph.nodes if n.group >= 0}


def stages_of(anatomy: Anatomy, table: dict[str, int], homes: Homes = NOWHERE) -> dict[fx.Node, int]:
    """Operator of this variant -> stage; one that training does not have follows its inputs."""
    stages: dict[fx.Node, int] = {}
    param, name = anatomy.captured.param, anatomy.captured.name
    last, outputs = max(table.values(), default=0), set(anatomy.captured.outputs)
    for node in anatomy.order:
        alone = last if node in outputs else 0  # the weight of a metric: made of the batch, where the loss is
        read = [homes[param[n]] for n in node.all_input_nodes if param.get(n) in homes]
        made = [stages[n] for n in node.all_input_nodes if n in stages]
        new = max(read, default=(False, alone))[1] if not made else 0
        stages[node] = max([table.get(name[node], new), *made])
    return stages


def reads_of(
    anatomy: Anatomy, table: dict[str, int], homes: Homes = NOWHERE
) -> dict[int, dict[str, fx.Node]]:
    """Stage -> parameter -> the first operator of this variant that reads it there."""
    param, found = anatomy.captured.param, dict[int, dict[str, fx.Node]]()
    for node, stage in stages_of(anatomy, table, homes).items():
        for n in node.all_input_nodes:
            if n in param:
                found.setdefault(stage, {}).setdefault(param[n], node)
    return found


def crossing(anatomy: Anatomy, stages: dict[fx.Node, int], n_stages: int, stage: int) -> list[fx.Node]:
    """What stage `stage` sends to the next one; the outputs of the model, for the last stage."""
    outputs = anatomy.captured.outputs
    if stage == n_stages - 1:
        return list(outputs)

    def used_later(n: fx.Node) -> bool:
        return any(stages.get(u, -1) > stage for u in n.users) or n in outputs

    return [n for n in anatomy.order if stages[n] <= stage and used_later(n)]


def stage_code(
    anatomy: Anatomy, table: dict[str, int], uses: dict[str, int], n_stages: int, stage: int,
    homes: Homes = NOWHERE,
) -> Code:  # fmt: skip
    """The code of one stage. `uses`: node name -> group in the training graph."""
    stages = stages_of(anatomy, table, homes)
    received = crossing(anatomy, stages, n_stages, stage - 1) if stage else []
    sent = crossing(anatomy, stages, n_stages, stage)
    body = [n for n in anatomy.order if stages[n] == stage]
    updates = [u for u in anatomy.captured.updates if stages.get(u.node, 0) == stage]
    return extract(anatomy, body, received, sent, updates, uses, comes=stage > 0, goes=stage < n_stages - 1)


def extract(
    anatomy: Anatomy,
    body: Sequence[fx.Node],
    received: Sequence[fx.Node],
    sent: Sequence[fx.Node],
    updates: Sequence[BufferUpdate],
    uses: dict[str, int],
    comes: bool = False,
    goes: bool = False,
) -> Code:
    """Copies some operators, and the free ones that they need, into a function of their own. comes, goes:
    whether what is received, and what is sent, is so in messages."""
    c, graph = anatomy.captured, fx.Graph()
    copied = [*_free_before(anatomy, [*body, *sent]), *body]
    reads = {n: None for op in copied for n in op.all_input_nodes}
    reads.update(dict.fromkeys(sent))

    def leaf(n: fx.Node, op: fx.Node) -> Leaf:
        return c.param[n], uses.get(c.name[op], -1)

    inputs = [n for n in c.inputs if n in reads]
    leaves = dict.fromkeys(leaf(n, op) for op in body for n in op.all_input_nodes if n in c.param)
    buffers = dict.fromkeys(c.buffer[n] for n in reads if n in c.buffer)
    rng = c.rng if c.rng and not reads.keys().isdisjoint(c.rng) else ()
    constants = {n: f"constant_{i}" for i, n in enumerate(n for n in reads if n in c.constant)}

    arrived: dict[fx.Node | Leaf | str, fx.Node] = {n: graph.placeholder(n.name) for n in received}
    env = dict(arrived)  # nodes, uses of parameters, buffers by name
    env |= {n: graph.placeholder(n.name) for n in inputs}
    env |= {use: graph.placeholder(f"weight_{i}") for i, use in enumerate(leaves)}
    env |= {name: graph.placeholder(f"buffer_{i}") for i, name in enumerate(buffers)}
    env |= {n: graph.placeholder(n.name) for n in rng}
    env |= {n: graph.get_attr(name) for n, name in constants.items()}
    learns = {n for n in received if c.mode == "train" and needs_grad(n)}
    gaps = [n for n in received if comes and n not in learns and not _is_dense(anatomy, n)]
    for n in gaps:
        env[n] = graph.call_function(laid_out, (arrived[n], tuple(anatomy.values[n].stride())))
    for op in copied:
        of = {n: leaf(n, op) if n in c.param else c.buffer.get(n, n) for n in op.all_input_nodes}
        env[op] = graph.node_copy(op, {n: env[key] for n, key in of.items()}.__getitem__)
    readers = Counter(leaf(n, op) for op in body for n in op.all_input_nodes if n in c.param)
    for match in anatomy.lowered(body):
        used = {n: leaf(n, op) for op in match.nodes for n in op.all_input_nodes if n in c.param}
        if anatomy.lowering.keeps_bits(match) and any(readers[use] > 1 for use in used.values()):
            continue  # autograd adds up all gradients of a use before any is added to the sum
        keys = {n: used.get(n, c.buffer.get(n, n)) for n in match.inputs}
        own = anatomy.lowering.owns(match)
        replace(match, own, env, {n: env[key] for n, key in keys.items()}.__getitem__)
    statistics = tuple(None if u.statistic is None else env[u.statistic] for u in updates)
    leaving = [env[n] for n in sent]
    if goes:
        leaving = [arrived[n] if n in arrived else _without_gaps(anatomy, n, env[n]) for n in sent]
    graph.output((tuple(leaving), statistics))
    # a mask, where an operator of ours reads a part of it, and what is passed on
    for n in [*(op for op in reversed(copied) if op in anatomy.free), *gaps]:
        if not env[n].users:
            graph.erase_node(env[n])
    return Code(
        fx.GraphModule({name: c.constant[n] for n, name in constants.items()}, graph),
        tuple(_port(anatomy, n, comes) for n in received),
        tuple(c.inputs[n] for n in inputs),
        tuple(leaves),
        tuple(buffers),
        bool(rng),
        tuple(_port(anatomy, n, goes) for n in sent),
        tuple(updates),
    )


def _port(anatomy: Anatomy, node: fx.Node, travels: bool) -> Port:
    value = anatomy.values[node]
    stride = sent_strides(value) if travels else tuple(value.stride())
    grad = anatomy.grads.get(node) if travels else None
    sent = stride if grad is None else sent_strides(grad)
    return Port(node.name, spec_of(node), stride, needs_grad(node), sent, uncut_strides(grad))


def sent_strides(t: Tensor) -> tuple[int, ...]:
    """In a message, which is dense."""
    dense = is_non_overlapping_and_dense_or_false(t)
    return tuple(t.stride() if dense else make_contiguous_strides_for(t.shape))


def uncut_strides(grad: Tensor | None) -> tuple[int, ...] | None:
    """As `Port.grad_uncut`, of a gradient as it is where nothing is cut."""
    stride = None if grad is None else tuple(grad.stride())
    return None if grad is None or stride == sent_strides(grad) else stride


def _without_gaps(anatomy: Anatomy, node: fx.Node, made: fx.Node) -> fx.Node:
    if _is_dense(anatomy, node):
        return made
    return made.graph.call_method("contiguous", (made,))


def _is_dense(anatomy: Anatomy, node: fx.Node) -> bool:
    return is_non_overlapping_and_dense_or_false(anatomy.values[node])


def laid_out(t: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A copy of `t` with the strides that it had before it was sent, with gaps or with elements that stand
    for several: for the same bits. Gradients do not go through it."""
    made = t.new_empty_strided(t.shape, stride)
    once = tuple(slice(1) if step == 0 else slice(None) for step in stride)
    made[once].copy_(t[once])
    return made


def _free_before(anatomy: Anatomy, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The replicated operators that some nodes depend on, in program order."""
    wanted, todo = set(), list(nodes)
    while todo:
        for n in todo.pop().all_input_nodes:
            if n in anatomy.free and n not in wanted:
                wanted.add(n)
                todo.append(n)
    return [n for n in anatomy.operators if n in wanted or (n in anatomy.free and n in nodes)]


def weight_code(anatomy: Anatomy) -> Code | float:
    """The weight of the loss as a function of the batch alone, or the number that it is.

    Raises PlanError if it depends on the model.
    """
    weight = anatomy.captured.weight
    if not isinstance(weight, fx.Node):
        return float(weight or 0.0)
    made_by = anatomy.made_by(weight)
    model = {*anatomy.captured.param, *anatomy.captured.buffer, *(anatomy.captured.rng or ())}
    if not made_by.isdisjoint(model):
        raise PlanError(
            "the weight of the loss depends on the model's outputs; it must be known before the first "
            "backward: compute it from the batch (the labels) alone"
        )
    body = [n for n in anatomy.operators if n in made_by and n not in anatomy.free]
    return extract(anatomy, body, [], [weight], [], {})
