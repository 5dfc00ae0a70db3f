"""What a group computes, counted and not timed: operators, their operations and bytes, on fake tensors.

The group runs forward and backward without values, and every operator that torch would start is noted,
so backward needs no rules of its own: it is torch's. What backward keeps is found as in `profile`, so a
plan's stash is the same whether its seconds are measured or modelled. Its workspace is not: here it is the
piece's own estimate, where a measurement sees what libraries take, a convolution several times its output.

Operations: torch.utils.flop_counter, for two per multiplication and addition; of our own operators, formulas
here. Where these add to a gradient in place, that is what counts, though fake tensors show a dense one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from mpipipe.graph.anatomy import Anatomy
from mpipipe.graph.capture import autocast
from mpipipe.graph.cut import Code
from mpipipe.graph.layers import Layer
from mpipipe.graph.pieces import Parts, Piece, Remade, Waiting, grad_bytes
from mpipipe.graph.profile import Profiler, arguments, cast_bytes
from mpipipe.graph.recompute import selective
from mpipipe.graph.source import TRACING
from mpipipe.graph.split import split
from mpipipe.graph.tape import tensors
from mpipipe.ops.cross_entropy import kept_elements, late_elements, summed_elements
from mpipipe.ops.device import CPU

_UNTOUCHED = {"empty", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view", "alias"}
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_RNN = "mkldnn_rnn_layer"
_HEAD_LOSS = "linear_cross_entropy"
_RNN_BYTES = 64  # that oneDNN keeps for backward, per element of an LSTM's output; fake tensors show none


@dataclass(frozen=True)
class Form:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of memory that is there: an expanded dimension has none."""
        sizes = zip(self.shape, self.stride, strict=True)
        return math.prod(size for size, step in sizes if step or size < 2) * self.dtype.itemsize


@dataclass(frozen=True)
class Work:
    """One call of an operator. arguments: (args, kwargs) with a `Form` for each tensor."""

    op: OpOverload
    arguments: Any
    flops: float
    nbytes: int  # read and written

    @property
    def name(self) -> str:
        return str(self.op.overloadpacket.__name__)

    @property
    def forms(self) -> list[Form]:
        return [x for x in tree_leaves(self.arguments) if isinstance(x, Form)]

    @property
    def key(self) -> str:
        """Equal for equal work, in every process."""
        return f"{self.op} {tree_map(_text, self.arguments)}"


@dataclass(frozen=True)
class Tally:
    """One group and one micro-batch. into: the part of backward that only the input gradients take;
    the rest as in `pieces.Sample`. opaque: it has layers that run as they are written, not counted."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    into: tuple[Work, ...]
    workspace_bytes: int
    saved_bytes: int
    saved_received: tuple[int, ...]
    saved_sent: tuple[int, ...]
    held_bytes: int  # inputs, weights with their gradients, and what is kept: what timing it would take
    opaque: bool
    again: tuple[Work, ...] = ()  # what selective recomputation does
    remade: Remade | None = None  # without seconds
    at_work_bytes: int = 0
    waiting: Waiting = Waiting()  # noqa: RUF009 - frozen
    returned: tuple[Parts, ...] = ()
    cast_bytes: int = 0


class Tallier(Profiler):
    """Counts pieces; nothing is allocated."""

    def __init__(self, anatomy: Anatomy, precision: str, ranks: int = 1) -> None:
        super().__init__(anatomy, precision, ranks=ranks, device=CPU)  # that of fake tensors

    def works(self, piece: Piece) -> tuple[Work, ...]:
        """Of its forward and its backward."""
        with TRACING, self._fake:
            forward, backward = self._counted(piece, *self._made(piece.code), True)
        return (*forward, *backward)

    def tally(self, piece: Piece) -> Tally:
        with TRACING, self._fake:
            code = piece.code
            received, rest = self._made(code)
            kept = self._saved(piece, received, rest)
            at_work, returned = self._at_work(piece, received, rest, kept)
            waiting = self._waiting(split(code), received, rest)
            saved, of_received, of_sent = kept
            forward, backward = self._counted(piece, received, rest, True)
            into: tuple[Work, ...] = ()
            if any(p.needs_grad for p in code.received):
                into = self._counted(piece, received, rest, False)[1] if code.leaves else backward
            again, remade = self._made_again(code, received, rest)
        saved += sum(map(_kept_bytes, forward))
        at_work = max(at_work, *map(_made_bytes, backward), 0)
        opaque = any(isinstance(n.target, Layer) for n in code.forward.graph.nodes)
        casts = cast_bytes(rest)
        held = casts + sum(t.nbytes * (2 if t.requires_grad else 1) for t in tensors((received, rest)))
        workspace = max(at_work + grad_bytes(code), piece.workspace_bytes)
        return Tally(
            forward, backward, into, workspace, saved, of_received, of_sent, held + saved, opaque, again,
            remade, at_work, waiting, returned, casts,
        )  # fmt: skip

    def _made_again(
        self, code: Code, received: list[Tensor], rest: list[object]
    ) -> tuple[tuple[Work, ...], Remade | None]:
        code = selective(self.anatomy, code, sent_too=True)
        if code.selective is None:
            return (), None
        inputs, counter = arguments(code, received, rest), _Counter()
        _, _, held = self._run(code, inputs)
        with autocast(self.precision), torch.no_grad(), counter:
            code.selective.refill(*inputs, *held)
        return tuple(counter.works), Remade.of(code.selective, 0.0)

    @property
    def _fake(self) -> Any:
        return self.anatomy.captured.outputs[0].meta["val"].fake_mode

    def _made(self, code: Code) -> tuple[list[Tensor], list[object]]:
        forms = [Form(p.spec.shape, p.stride, getattr(torch, p.spec.dtype)) for p in code.received]
        return [made(form) for form in forms], self._rest(code)

    def _counted(
        self, piece: Piece, received: list[Tensor], rest: list[object], weights: bool
    ) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
        """Work of one forward and one backward; `weights=False`: input gradients alone."""
        inputs, ahead, back = arguments(piece.code, received, rest, weights), _Counter(), _Counter()
        with ahead:
            sent, _ = self._run(piece.code, inputs)
        heads = [t for t in sent if t.grad_fn is not None]
        if heads:
            grads = [torch.ones_like(t) for t in heads]
            with back:
                torch.autograd.backward(heads, grads)
            return tuple(ahead.works), tuple(_in_place(ahead.works, back.works))
        return tuple(ahead.works), ()


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = tensors(out)
        if outputs and not func.is_view and func.overloadpacket.__name__ not in _UNTOUCHED:
            self.works.append(_work(func, args, kwargs or {}, out, outputs))
        return out


def counted(op: OpOverload, arguments: Any) -> Work:
    """The work of a call whose tensors are `Form`s, inside a fake mode. Raises what the operator raises."""
    counter = _Counter()
    args, kwargs = tree_map(made, arguments)
    with counter:
        op(*args, **kwargs)
    return counter.works[-1]


def made(x: Any) -> Any:
    """A tensor of that form, of halves or zeros; anything else as it is."""
    if not isinstance(x, Form):
        return x
    t = torch.empty_strided(x.shape, x.stride, dtype=x.dtype)
    return t.fill_(0.5 if x.dtype.is_floating_point else 0) if 0 not in x.stride else t


def _work(func: Any, args: Any, kwargs: Any, out: Any, outputs: Iterable[Tensor]) -> Work:
    arguments = tree_map(_form, (args, kwargs))
    forms = [x for x in tree_leaves(arguments) if isinstance(x, Form)]
    results = [_form(t) for t in outputs]
    if func.overloadpacket.__name__ == "embedding":  # reads the rows that it gives, not the table
        indices = forms[0 if _is_ours(func) else 1]
        nbytes = indices.nbytes + 2 * results[0].nbytes
    elif func.overloadpacket.__name__ == _HEAD_LOSS and _is_ours(func) and _is_late(_HEAD_LOSS, args):
        nbytes = 0
    elif func.overloadpacket is torch.ops.aten.index_add_:  # reads and writes the rows that it adds to
        nbytes = forms[1].nbytes + 3 * forms[2].nbytes
    else:
        nbytes = sum(form.nbytes for form in (*forms, *results))
    return Work(func, arguments, _flops(func, args, kwargs, out, forms), nbytes)


def _is_ours(op: OpOverload) -> bool:
    return op.namespace == "mpipipe"


def _in_place(forward: Iterable[Work], backward: Iterable[Work]) -> list[Work]:
    """The backward, in which our embedding and head add a weight's gradient to the sum, row by row or tile by
    tile: without the dense one of the embedding, and without adding either to the sum afterwards."""
    ours = [w for w in forward if _is_ours(w.op) and w.name in ("embedding", _HEAD_LOSS)]
    tables = [w.forms[1] for w in ours]
    rows = {w.forms[1].shape: w.forms[0] for w in ours if w.name == "embedding"}
    works: list[Work] = []
    for work in backward:
        if work.name == "embedding_dense_backward" and (of := _sum_of(work)) in rows:
            dy, flat = work.forms[0], Form((math.prod(rows[of].shape),), (1,), torch.int64)
            added = Form((*flat.shape, of[1]), (of[1], 1), dy.dtype)
            table = Form(of, (of[1], 1), dy.dtype)
            works.append(counted(torch.ops.aten.index_add_.default, ((table, 0, flat, added), {})))
        elif work.name == "add_" and work.forms[0] in tables and work.forms[0] == work.forms[1]:
            tables.remove(work.forms[0])
        else:
            works.append(work)
    return works


def _sum_of(work: Work) -> tuple[int, int]:
    """The shape of the gradient that an embedding's dense backward makes."""
    return work.arguments[0][2], work.forms[0].shape[-1]


def _kept_bytes(work: Work) -> int:
    """Of what an operator of a forward keeps for backward without showing it to fake tensors."""
    if work.name == _RNN:
        return _RNN_BYTES * _elements(work)
    if _is_ours(work.op) and work.name == _HEAD_LOSS and not _is_late(work.name, work.arguments[0]):
        x, weight = work.forms[:2]
        return kept_elements(x.shape[0], *weight.shape) * x.dtype.itemsize
    return 0


def _made_bytes(work: Work) -> int:
    """Of what an operator of a backward makes for itself."""
    if not _is_ours(work.op) or not work.name.startswith(_HEAD_LOSS) or not work.name.endswith("backward"):
        return 0
    x, weight = work.forms[1:3]
    late = _is_late(work.name, work.arguments[0])
    (entries, width), size = weight.shape, x.dtype.itemsize
    head = x.shape[0], entries, width
    logits = late_elements(*head, size) * size if late else 0
    to_weight = work.arguments[0][8][1]
    return logits + to_weight * 4 * summed_elements(*head, size, weight.dtype.itemsize, late)


def _is_late(name: str, args: Any) -> bool:
    """Of the loss of the head: whether all of it is done in backward."""
    return args[5] is None if name.endswith("backward") else len(args) > 6 and bool(args[6])


def _flops(func: Any, args: Any, kwargs: Any, out: Any, forms: list[Form]) -> float:
    name = func.overloadpacket.__name__
    if _is_ours(func):
        return _own_flops(name, args)
    if name.startswith(_ATTENTION):
        return _attention_flops(name, args, (4, 7))
    if name.startswith(_RNN):  # input (T, B, I), weights (gates H, I) and (gates H, H)
        once = 2.0 * math.prod(forms[0].shape[:2]) * sum(math.prod(f.shape) for f in forms[1:3])
        return once * (2.0 if name.endswith("backward") else 1.0)
    packet = torch.ops.aten.addmm if name == "addmm_" else func.overloadpacket
    formula: Callable[..., float] | None = flop_registry.get(packet)
    return float(formula(*args, **kwargs, out_val=out)) if formula else 0.0


def _own_flops(name: str, args: Any) -> float:
    """Of those that are products. The loss of the head makes in backward its logits again but for those of
    one tile, or all of them there only; and wanted gradients."""
    if name.startswith("flash_attention"):
        return _attention_flops(name, args, (5, 8))
    if name.startswith(_HEAD_LOSS):
        back = name.endswith("backward")
        x, weight = args[1:3] if back else args[:2]
        kept = kept_elements(x.shape[0], *weight.shape) / max(1, x.shape[0] * weight.shape[0])
        ahead, again = (0.0, 1.0) if _is_late(name, args) else (1.0, 1.0 - kept)
        products = again + sum(args[8][:2]) if back else ahead
        return products * 2.0 * x.numel() * weight.shape[0]
    return 0.0


def _attention_flops(name: str, args: Any, causal: tuple[int, int]) -> float:
    """Two products forward, five backward (Dao et al. 2022); a causal one does half. causal: where the
    argument is that says so, forward and backward; it may be left out."""
    back = name.endswith("backward")
    q, k = args[back : back + 2]
    halved = any(args[causal[back] : causal[back] + 1])
    return (5 if back else 2) * 2.0 * q.numel() * k.shape[-2] * (0.5 if halved else 1.0)


def _form(x: Any) -> Any:
    return Form(tuple(x.shape), tuple(x.stride()), x.dtype) if isinstance(x, Tensor) else x


def _text(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}{list(x.stride)}" if isinstance(x, Form) else str(x)


def _elements(work: Work) -> int:
    return math.prod((*work.forms[0].shape[:2], work.forms[2].shape[-1]))
