"""Why a step is not finite: what was the first to be so. Asked on the way out only; a good step pays nothing.

    a weight before the step  >  the batch  >  the first operator in the forward  >  a gradient

The forward of the first bad micro-batch runs once more, operator by operator, stage after stage. NaN is
always wrong; infinity may be meant (a mask), so it is wrong only where NaN or the loss comes of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from mpipipe.cluster.comm import Communicator, gathered
from mpipipe.graph.cut import Code
from mpipipe.graph.place import placed
from mpipipe.graph.rewrite import source_line
from mpipipe.graph.source import TRACING
from mpipipe.ops.device import CPU, here
from mpipipe.runtime.feed import Source
from mpipipe.runtime.interpreter import Interpreter, Outcome
from mpipipe.runtime.transport import Form, as_bytes

_SMALLER = "lower train.lr, lengthen train.warmup or set train.clip"


def blame(comm: Communicator, interpreter: Interpreter, source: Source, outcome: Outcome) -> str:
    """What to say of the step that `interpreter` has just ended as not finite; the same on every rank.
    source: the micro-batches of that step, which can be asked for again. Collective."""
    loss = outcome.loss / outcome.weight
    if weight := _first(comm, _bad_weight(comm.rank, interpreter)):
        return (
            f"{weight} was not finite before the step: an earlier update overflowed, or it began so; go on "
            "from an earlier checkpoint with a lower train.lr, a longer train.warmup or train.clip"
        )
    losses = interpreter.outcome.values.items()
    bad = min((micro for micro, (value, *_) in losses if not math.isfinite(value)), default=None)
    micro = min((m for m in comm.allgather_object(bad) if m is not None), default=None)
    if micro is not None and (found := _resolve(_replay(comm, interpreter, source, micro))):
        return f"the loss is {loss}: {found}"
    if outcome.not_finite:
        return f"{_nearest(interpreter, outcome.not_finite)} is not finite; the loss is {loss}\n  {_SMALLER}"
    return f"the loss is {loss}, which forward does not show a second time\n  {_SMALLER}"


def _first(comm: Communicator, found: str) -> str:
    return next((text for text in comm.allgather_object(found) if text), "")


def _bad_weight(rank: int, interpreter: Interpreter) -> str:
    for stage in interpreter.stages.values():
        for name, t in stage.weights.data.items():
            if not torch.isfinite(t).all():
                return f"the weight {name!r} (stage {stage.weights.stage}, rank {rank})"
    return ""


def _nearest(interpreter: Interpreter, names: Sequence[str]) -> str:
    """Of several gradients, that nearest to the loss: backward has spoilt those before it."""
    used = {name: i for i, n in enumerate(interpreter.variants.graph.nodes) for name in n.params}
    name = max(names, key=lambda n: used[n])
    stage = interpreter.variants.stage_of_param(interpreter.cuts)[name]
    place = f"stage {stage}, rank {interpreter.program.rank_of_stage[stage]}"
    return f"the gradient of {name!r} ({place}, the nearest to the loss of {len(names)})"


# -- once more, operator by operator ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """By one stage. origin: of the first NaN, or of the infinite loss; sent: of an infinity that is sent on.
    Empty where there is none; `RECEIVED` where it came in as an infinity."""

    origin: str = ""
    sent: str = ""
    made: str = ""  # where `origin` came in: the operator here that made NaN of it


_RECEIVED = "received"


def _resolve(stages: Sequence[_Seen]) -> str:
    """The text of the earliest origin; what came in is followed back through the stages before."""
    s = next((s for s, seen in enumerate(stages) if seen.origin), None)
    if s is None:
        return ""
    if stages[s].origin != _RECEIVED:
        return stages[s].origin
    before = next((seen.sent for seen in reversed(stages[:s]) if seen.sent != _RECEIVED), "")
    return before or stages[s].made


def _replay(comm: Communicator, interpreter: Interpreter, source: Source, micro: int) -> list[_Seen]:
    """By stage, of the copy of the pipeline that does the micro-batch. Collective."""
    ranks, last = interpreter.program.chain_of(micro), interpreter.n_stages - 1
    seen: dict[int, _Seen] = {}
    tensors: list[Tensor] = []
    for s in interpreter.stages if micro in interpreter.share else ():
        code = interpreter.code(s, micro)
        if s > 0 and ranks[s - 1] != comm.rank:
            landed = [Form.of(port).empty(CPU) for port in code.received]
            for t in landed:
                comm.wait(comm.irecv(as_bytes(t), ranks[s - 1], 0))
            tensors = [t.to(here()) for t in landed]
        tensors, seen[s] = _watch(interpreter, source, s, micro, code, tensors)
        if s < last and ranks[s + 1] != comm.rank:
            for port, t in zip(code.sent, tensors, strict=True):
                comm.wait(comm.isend(as_bytes(Form.of(port).shape_like(t).cpu()), ranks[s + 1], 0))
    found = gathered(comm, seen)
    return [found[s] for s in range(interpreter.n_stages)]


def _watch(
    interpreter: Interpreter, source: Source, s: int, micro: int, code: Code, received: list[Tensor]
) -> tuple[list[Tensor], _Seen]:
    """What the stage sends, and what it saw."""
    stage, job, code = interpreter.stages[s], interpreter.job, placed(code, here())
    batch = source.take(micro, frozenset(code.inputs)) if code.inputs else {}
    watch = _Watch(code.forward)
    with TRACING, torch.no_grad(), stage.autocast():
        sent, _ = watch.run(*stage.arguments(code, micro, received, batch, job.step, train=False))
    where = f"in micro-batch {micro} (stage {s}, rank {interpreter.rank_of_stage[s]})"
    anatomy = interpreter.variants.anatomy("train", source.specs[micro])
    names = {n.name: name for n, name in anatomy.captured.name.items()}
    first = {key: sum(specs[key].shape[0] for specs in source.specs[:micro]) for key in batch}
    tell = _Tell(watch, code, where, names, batch, first, source.name_of)
    return list(sent), tell.seen(s == interpreter.n_stages - 1)


class _Watch(fx.Interpreter):
    """nan, inf: the nodes whose result has one."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.nan: set[fx.Node] = set()
        self.inf: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if _is_unwritten(n):
            return result
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]
        if any(t.isnan().any() for t in tensors):
            self.nan.add(n)
        if any(t.isinf().any() for t in tensors):
            self.inf.add(n)
        return result


def _is_unwritten(n: fx.Node) -> bool:
    """Memory as it was found, which may hold anything: what counts is what is written there."""
    name = str(getattr(getattr(n.target, "overloadpacket", n.target), "__name__", ""))
    return n.op == "call_function" and name.startswith(("empty", "new_empty"))


@dataclass(frozen=True)
class _Tell:
    watch: _Watch
    code: Code
    where: str
    names: Mapping[str, str]  # node of the stage's code -> canonical name
    batch: Mapping[str, Tensor]
    first: Mapping[str, int]  # by key: samples of the step before this micro-batch
    name_of: Callable[[int], str]  # a sample of the step

    def seen(self, last: bool) -> _Seen:
        nodes = list(self.code.forward.graph.nodes)
        results = nodes[-1].args[0][0]
        nan, inf = self.watch.nan, self.watch.inf
        bad = next((n for n in nodes[:-1] if n in nan and nan.isdisjoint(n.all_input_nodes)), None)
        if bad is None and last and results[0] in inf:
            bad = results[0]
        carrier = None if last else next((n for n in results if n in inf), None)
        sent = self._text(self._origin(carrier) or carrier) if carrier else ""
        if bad is None or bad in self._received:  # then an earlier stage has its origin
            return _Seen(sent=sent)
        origin = self._origin(bad) or bad
        return _Seen(self._text(origin), sent, self._text(bad))

    @property
    def _inputs(self) -> list[fx.Node]:
        return [n for n in self.code.forward.graph.nodes if n.op == "placeholder"]

    @property
    def _received(self) -> list[fx.Node]:
        return self._inputs[: len(self.code.received)]

    def _origin(self, node: fx.Node) -> fx.Node | None:
        """The first infinity on the way to a node; None where it is meant: written as one, or a constant."""
        while source := next((n for n in node.all_input_nodes if n in self.watch.inf), None):
            node = source
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        meant = node.op == "get_attr" or any(isinstance(x, float) and math.isinf(x) for x in leaves)
        return None if meant else node

    def _text(self, node: fx.Node) -> str:
        if node in self._received:
            return _RECEIVED
        what = "nan" if node in self.watch.nan else "inf"
        if node.op == "placeholder":
            return self._of_input(self._inputs.index(node) - len(self.code.received), what)
        leaves = dict(zip(self._inputs[self._before_leaves :], self.code.leaves, strict=False))
        reads = [repr(leaves[n][0]) for n in node.all_input_nodes if n in leaves]
        values = "finite values" if self.watch.inf.isdisjoint(node.all_input_nodes) else "inf"
        weights = f" and {', '.join(reads)}" if reads else ""
        return (
            f"{self.names.get(node.name, node.name)!r} makes {what} of {values}{weights}, {self.where}\n"
            f"  {source_line(node)}\n  {_SMALLER}, or keep its input from where that happens"
        )

    @property
    def _before_leaves(self) -> int:
        return len(self.code.received) + len(self.code.inputs)

    def _of_input(self, i: int, what: str) -> str:
        if i >= len(self.code.inputs):
            buffers = [name for name, _ in self.code.leaves] + list(self.code.buffers)
            return f"the buffer {buffers[i - len(self.code.inputs)]!r} holds {what} {self.where}"
        key = self.code.inputs[i]
        sample = self.first[key] + int((~torch.isfinite(self.batch[key])).nonzero()[0, 0])
        called = self.name_of(sample)
        return (
            f"the input {key!r} holds {what} in sample {sample} of the batch{called and f', {called}'}, "
            f"{self.where}; mend that sample or leave it out"
        )
