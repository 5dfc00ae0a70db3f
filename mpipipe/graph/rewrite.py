"""Side effects leave the captured graph: what is random, and what mutates a buffer.

  random op          -> its counter-based twin (mpipipe.ops), fed by the placeholders step and micro
  BatchNorm          -> a pure normalisation that also returns its statistics; the owner of the
                        buffers applies them at STEP, in micro-batch order
  counter.add_(1)    -> an update of the same kind
  a change of the batch -> made on a copy
  any other mutation -> refused, with the user's source line; so is another reader of what changes

So forward is a pure function of (weights, batch, step, micro-batch): evaluation, profiling and
recomputation may run it as often as they like.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mpipipe import ops
from mpipipe.errors import CaptureError
from mpipipe.graph.regions import region_of
from mpipipe.ops.batch_norm import batch_norm_with_statistics

_HERE = str(Path(__file__).parent)
# operators that may return their input itself, though their schema does not say so
_MAYBE_ALIAS = {
    "aten::contiguous", "aten::reshape", "aten::to", "aten::type_as", "aten::to_dense", "aten::flatten",
    "aten::sum_to_size", "aten::atleast_1d", "aten::atleast_2d", "aten::atleast_3d", "aten::conj_physical",
    "aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout",
}  # fmt: skip
_NORMS = {"aten::batch_norm", "aten::instance_norm"}


@dataclass(frozen=True)
class BufferUpdate:
    """What one node adds to a buffer, once per micro-batch.

    momentum m: buffer = (1 - m) * buffer + m * statistic;  None: buffer += 1 (no statistic)
    """

    buffer: str
    momentum: float | None
    statistic: fx.Node | None
    node: fx.Node  # the stage of this node owns the buffer


class Untraceable(CaptureError):
    """What a model computes cannot be a graph; a part that runs as it is written may do.

    module: the one in which it was found, by its name in the graph ("" is the loss); None: see the cause
    """

    def __init__(self, text: str, module: str | None = None) -> None:
        super().__init__(text)
        self.module = module


def module_of(node: fx.Node) -> str:
    """The innermost module whose forward made a node, by its name in what was traced: "model.blocks.0"."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def source_line(node: fx.Node) -> str:
    """The user's line that made a node: the innermost frame outside of torch and of capture itself,
    which calls the loss; torch keeps the frames of modules only."""
    frames = [f.strip() for f in (node.stack_trace or "").split("File ") if f.strip()]
    user = [f for f in frames if "/torch/" not in f.split(",")[0] and not f.startswith(f'"{_HERE}')]
    if not frames:
        return "(source line unknown)"
    if not user:
        path = module_of(node)
        layer = path.removeprefix("model").removeprefix(".")
        return f"in layer {layer}" if layer else "in the model" if path else "in the loss"
    return "File " + " ".join(user[-1].split())


def torch_op(node: fx.Node) -> Any:
    """A node's torch operator, also after its target was replaced by ours; or a plain function."""
    return node.meta.get("torch_op", node.target)


def schema_of(node: fx.Node) -> Any:
    """The schema of a node's torch operator, or None."""
    return getattr(torch_op(node), "_schema", None)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Every argument of a torch operator by name, those that were not given too."""
    given = {a.name: a.default_value for a in schema_of(node).arguments}
    return given | dict(zip(given, node.args, strict=False)) | node.kwargs


def schema_name(node: fx.Node) -> str:
    """`aten::linear`, or the name of a plain function."""
    schema, op = schema_of(node), torch_op(node)
    return schema.name if schema is not None else getattr(op, "__name__", str(op))


def op_text(node: fx.Node) -> str:
    """`aten.linear.default`, or the name of a plain function, and the region it runs in: the same text in
    every process."""
    op = torch_op(node)
    plain = getattr(op, "text", getattr(op, "__name__", ""))
    name = str(op) if schema_of(node) is not None else plain
    return name + region_of(node).text


def settings_text(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    """The arguments of a node, those that are nodes by `name`. Its random stream is left out: that follows
    from the seed, the node's name and the micro-batch."""
    kwargs = {k: v for k, v in node.kwargs.items() if k not in ("key", "step", "micro")}
    args, kwargs = fx.node.map_arg((node.args, kwargs), name)
    return f"{args} {kwargs}" if kwargs else f"{args}"


def _given(node: fx.Node) -> list[tuple[Any, fx.Node]]:
    """The nodes among a torch operator's arguments, and those in a list of them, each with its place in the
    schema; by position or by name, as `out=` is. None of a plain function."""
    pairs, schema = [], schema_of(node)
    for i, argument in enumerate(() if schema is None else schema.arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        pairs += [(argument, v) for v in values if isinstance(v, fx.Node)]
    return pairs


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs that a node's result may share memory with."""
    if getattr(torch_op(node), "__name__", "") in ("getitem", "item"):
        return [node.args[0]]  # type: ignore[list-item]
    found = [v for a, v in _given(node) if a.alias_info is not None]
    if not found and schema_name(node) in _MAYBE_ALIAS and isinstance(node.args[0], fx.Node):
        found.append(node.args[0])
    return found


def memory_of(node: fx.Node) -> fx.Node:
    """The node whose memory this one shows: itself, or what it is a view of."""
    while sources := aliased_inputs(node):
        node = sources[0]
    return node


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors an in-place operator writes."""
    return [v for a, v in _given(node) if a.alias_info is not None and a.alias_info.is_write]


def copy_written_inputs(graph: fx.Graph) -> None:
    """A batch tensor that forward changes in place is copied first. The copy is an operator like any other,
    so stages after the write get what was written, and not their own load of the batch."""
    written = {memory_of(target) for n in graph.nodes for target in mutated_inputs(n)}
    for node in [n for n in graph.find_nodes(op="placeholder") if n in written]:
        first = next(n for n in graph.nodes if n in node.users)
        with graph.inserting_before(first):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = {k: v for k, v in first.meta.items() if k != "val"}
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)


def copy_bare_outputs(graph: fx.Graph) -> None:
    """A model may return a batch input or a weight itself; the last stage then returns a copy."""
    output = graph.output_node()
    for node in [n for n in output.all_input_nodes if n.op != "call_function"]:
        with graph.inserting_before(output):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        output.replace_input_with(node, copy)


def keep_lifted_tensors_apart(graph: fx.Graph) -> None:
    """`torch.tensor([1.0])` in forward is a constant and a copy of it, detached in place: the copy is
    enough, and without the write it is made again on every stage that needs it."""
    for node in list(graph.nodes):
        if schema_name(node) == "aten::detach_" and schema_name(node.args[0]) == "aten::lift_fresh_copy":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def make_random_ops_ours(
    graph: fx.Graph, names: dict[fx.Node, str], seed: int
) -> tuple[fx.Node, fx.Node] | None:
    """Replaces random operators by their twins.

    Returns the placeholders of (step, global micro-batch), or None where nothing is random.
    """
    random = [
        n for n in graph.nodes
        if n.op == "call_function" and (_takes_stream(n) or ops.draws(n.target, n.args, n.kwargs))
    ]  # fmt: skip
    if not random:
        return None
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        micro = graph.placeholder("micro")
        micro.prepend(step := graph.placeholder("step"))
    step.meta["val"] = micro.meta["val"] = 0
    for node in random:
        twin = node.target if _takes_stream(node) else ops.replacement(node.target)
        if twin is None:
            raise Untraceable(
                f"{source_line(node)}\n  uses the random operator {node.target}, which has no reproducible "
                "twin; use dropout, rand, randn, randint or bernoulli, or draw the numbers in the data set",
                module_of(node),
            )
        node.meta["torch_op"] = node.target
        node.target = twin
        node.kwargs = {**node.kwargs, "key": ops.stream_key(seed, names[node]), "step": step, "micro": micro}
    return step, micro


def _takes_stream(node: fx.Node) -> bool:
    """Whether its target is ours already (a layer that runs as it is written)."""
    return getattr(node.target, "takes_stream", False)


def make_buffers_functional(
    graph: fx.Graph, names: dict[fx.Node, str], buffer_of: dict[fx.Node, str], others: list[BufferUpdate]
) -> list[BufferUpdate]:
    """Takes buffer mutations out of the graph and returns them, among others that are out of it already.
    `buffer_of`: get_attr -> buffer."""
    updates = list(others)
    for node in list(graph.nodes):
        if schema_name(node) not in _NORMS or not node.args[5] or node.args[3] is None:
            continue
        if schema_name(node) == "aten::instance_norm" or node.args[3] not in buffer_of:
            raise CaptureError(
                f"{source_line(node)}\n  {schema_name(node)} keeps running statistics; only a BatchNorm may, "
                "in buffers of the model: use track_running_stats=False"
            )
        updates += _split_batch_norm(graph, node, names, buffer_of)
    for node in list(graph.nodes):
        for target in mutated_inputs(node):
            if memory_of(target).op == "get_attr":
                if schema_name(node) == "aten::add_":  # it returns what it wrote: two counts are two updates
                    node.replace_all_uses_with(target)
                updates.append(_counter(node, target, buffer_of))
                graph.erase_node(node)
    for name in {u.buffer: None for u in updates}:
        if reader := reader_of(name, buffer_of, {u.node for u in others}):
            raise CaptureError(
                f"{source_line(reader)}\n  reads {name!r}, which a BatchNorm or a counter changes; that is "
                "done at the end of a step, on one stage: compute what is needed from the batch "
                "(`x.mean(0)`), read a buffer that nothing changes, or read it outside of forward"
            )
    order = {node: i for i, node in enumerate(graph.nodes)}
    return sorted(updates, key=lambda u: order[u.node])  # a BatchNorm may run twice


def reader_of(name: str, buffer_of: Mapping[fx.Node, str], but: Collection[fx.Node] = ()) -> fx.Node | None:
    """The operator that reads a buffer; where there are several, one that is no BatchNorm."""
    users = (user for node, buffer in buffer_of.items() if buffer == name for user in node.users)
    readers = [user for user in users if user not in but]
    return max(readers, key=lambda n: schema_name(n) != "aten::batch_norm", default=None)


def _counter(node: fx.Node, target: fx.Node, buffer_of: dict[fx.Node, str]) -> BufferUpdate:
    plain = schema_name(node) == "aten::add_" and not node.kwargs and not node.users
    counts = plain and node.args[1] == 1
    if target not in buffer_of or not counts:
        name = str(memory_of(target).target).removeprefix("model.")
        raise CaptureError(
            f"{source_line(node)}\n  changes {name!r} of the model in place by {node.target}; only "
            "BatchNorm statistics and counters (`buffer.add_(1)`) are supported: return it as an output, "
            "or keep it outside of forward"
        )
    user = node.next
    while user.op != "call_function" or mutated_inputs(user):  # a counter belongs to what follows it
        user = user.next
    return BufferUpdate(buffer_of[target], None, None, user)


def _split_batch_norm(
    graph: fx.Graph, node: fx.Node, names: dict[fx.Node, str], buffer_of: dict[fx.Node, str]
) -> list[BufferUpdate]:
    x, weight, bias, running_mean, running_var, _, momentum, eps, *_ = node.args
    with graph.inserting_before(node):
        pure = graph.call_function(batch_norm_with_statistics, (x, weight, bias, eps))
        parts = [graph.call_function(item, (pure, i)) for i in range(3)]
    path = names.pop(node)
    for new, name in zip([pure, *parts], [path, f"{path}.y", f"{path}.mean", f"{path}.var"], strict=True):
        new.meta = {k: v for k, v in node.meta.items() if k != "val"}
        names[new] = name
    node.replace_all_uses_with(parts[0])
    graph.erase_node(node)
    buffers = [(running_mean, parts[1]), (running_var, parts[2])]
    return [BufferUpdate(buffer_of[b], float(momentum), s, pure) for b, s in buffers]  # type: ignore[arg-type,index]


def item(values: tuple[Any, ...], index: int) -> Any:
    """`values[index]`."""
    return values[index]
