"""What each group costs: every distinct group timed once, warm, on the ranks that will run it.

A GPT of any depth has about ten distinct groups, so this takes seconds. Groups are timed as the
stage will run them (same code, same autocast, gradients accumulated in place) and alone; the sum
over a stage predicts a GPT within a few per cent.

Memory kept for backward is read off torch's saved-tensor hooks, by storage, so that a tensor saved
by two groups counts once. Casts of weights are there from a first run on, as from a step's first micro-batch;
that one's seconds for them are in no cost.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mpipipe.graph.anatomy import Anatomy, needs_grad, output_specs, spec_of
from mpipipe.graph.capture import autocast
from mpipipe.graph.cut import Code, Port
from mpipipe.graph.pieces import Parts, Piece, Remade, Sample, Waiting, grad_bytes
from mpipipe.graph.place import placed
from mpipipe.graph.recompute import selective
from mpipipe.graph.source import TRACING
from mpipipe.graph.split import split
from mpipipe.graph.tape import storage_id, tensors
from mpipipe.ops.deferred import Pending
from mpipipe.ops.device import growth_bytes, here
from mpipipe.ops.evict import evict
from mpipipe.ops.linear import casts_of, share_casts
from mpipipe.values import TensorSpec

T = TypeVar("T")
# bytes of its own making, indices of the received and of the sent tensors that backward needs
Saved = tuple[int, tuple[int, ...], tuple[int, ...]]
REPEATS = 5  # the shortest counts: what else runs on the machine only ever adds
CACHE_BYTES = 64 << 20  # more than the last-level cache that a core has to itself
_DRAWN = 1 << 14  # numbers that made-up inputs consist of
_LAID_OUT = {"convolution", "convolution_backward"}  # by a library in its own way first, then as asked for
REFUSALS = (RuntimeError, IndexError, ValueError)  # of operators, such as a Cholesky of made-up numbers
LONG_S = 0.5  # seconds for all repeats of a group; one that takes longer is timed twice, after its warm-up


def working_set_bytes(anatomy: Anatomy) -> int:
    """What one micro-batch touches: each result that has memory of its own, each weight and its gradient."""
    results = sum(s.nbytes for n in anatomy.order if anatomy.root(n) is n for s in output_specs(n))
    return results + 2 * sum(spec_of(n).nbytes for n in anatomy.captured.param)


class Live(TorchDispatchMode):
    """Entered, it counts the memory of what operators make: nbytes, of what is there now, and most_bytes, at
    the end of any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = {storage_id(t) for t in tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for t in tensors(out):
            if storage_id(t) not in there:
                storage = t.untyped_storage()
                self._made[storage_id(t)] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        laid_out = [t.nbytes for t in tensors(out)] if func.overloadpacket.__name__ in _LAID_OUT else []
        self.most_bytes = max(self.most_bytes, self.nbytes + max(laid_out, default=0))
        return out

    @property
    def nbytes(self) -> int:
        return self.beside(())

    def beside(self, others: Collection[StorageWeakRef]) -> int:
        """`nbytes` of what is not one of them."""
        return sum(n for ref, n in self._made.values() if not ref.expired() and ref not in others)


class Profiler:
    """Times pieces with made-up inputs. `clock`: seconds; `ranks`: among how many the model will be cut;
    `device`: where they run; None = that of this rank."""

    def __init__(
        self,
        anatomy: Anatomy,
        precision: str,
        clock: Callable[[], float] = time.perf_counter,
        ranks: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self.anatomy, self.precision, self.clock, self.device = anatomy, precision, clock, device or here()
        self.chilled_bytes = min(CACHE_BYTES, working_set_bytes(anatomy) // ranks)
        self._cold = torch.empty(self.chilled_bytes, dtype=torch.uint8, device=self.device)

    def chill(self, weights: Iterable[Tensor] = ()) -> None:
        """Drops from the caches what a step would: between two uses of a weight or of a saved tensor, the
        other groups of the stage run. A small stage stays in cache, so its groups do here; the weights of a
        large one, and their gradients, come from memory each time, however large a shared cache is."""
        self._cold.fill_(0)
        if self.chilled_bytes == CACHE_BYTES:
            evict(t for w in weights for t in (w, w.grad, *casts_of(w)) if t is not None)

    @cached_property
    def _call_s(self) -> tuple[float, float]:
        """Seconds of a forward and a backward of nothing. A stage is called once per micro-batch, not once
        for each of its groups."""
        graph = fx.Graph()
        graph.output(((graph.placeholder("x"),), ()))
        port = Port("x", TensorSpec((1,), "float32"), (1,), True, (1,))
        nothing = Code(fx.GraphModule({}, graph), (port,), (), (), (), False, (port,), ())
        both = [self._once(nothing, [torch.zeros(1, device=self.device)], []) for _ in range(REPEATS)]
        forward, backward = (min(column) for column in zip(*both, strict=True))
        return forward, backward

    def sample(self, piece: Piece) -> Sample:
        """Raises one of `REFUSALS` where its operators take no made-up numbers."""
        return self._accepted(piece, self._sample)

    def run(self, piece: Piece, times: int) -> float:
        """Seconds of forward and backward, the shortest of some times; one before them does not count. inf
        where it was not timed, or its operators take no made-up numbers."""
        with suppress(*REFUSALS):
            return self._accepted(piece, partial(self._seconds, times))
        return math.inf

    def _seconds(self, times: int, piece: Piece, received: list[Tensor], rest: list[object]) -> float:
        self._once(piece.code, received, rest, False)
        both = [self._once(piece.code, received, rest) for _ in range(times)]
        return sum(self._shortest(both)) if both else math.inf

    def _accepted(self, piece: Piece, work: Callable[[Piece, list[Tensor], list[object]], T]) -> T:
        """Done on numbers of a normal distribution, else on halves: an operator may ask for probabilities."""
        with TRACING:
            received, rest = self._arguments(piece.code)
            try:
                return work(piece, received, rest)
            except REFUSALS as error:
                halves = [t.fill_(0.5) if t.dtype.is_floating_point else t for t in received]
                with suppress(*REFUSALS):
                    return work(piece, halves, self._rest(piece.code))
                raise error

    def _arguments(self, code: Code) -> tuple[list[Tensor], list[object]]:
        return [self._fill(p.spec, p) for p in code.received], self._rest(code)

    def _run(self, code: Code, arguments: Sequence[object]) -> Any:
        """What its forward returns."""
        with torch.enable_grad(), autocast(self.precision, self.device.type):
            return placed(code, self.device).forward(*arguments)

    def _shortest(self, both: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Forward and backward, without what a call costs."""
        forward, backward = (min(column) for column in zip(*both, strict=True))
        return max(0.0, forward - self._call_s[0]), max(0.0, backward - self._call_s[1])

    def _sample(self, piece: Piece, received: list[Tensor], rest: list[object]) -> Sample:
        code = piece.code
        saved = self._saved(piece, received, rest)
        cold = sum(self._once(code, received, rest, False))  # dropped: 5 to 100 % slower
        repeats = min(REPEATS, max(2, round(LONG_S / max(cold, 1e-9))))
        parted, both, in_two = split(code), [], []
        for _ in range(repeats):  # in turns, so that a machine that changes meanwhile changes both
            both.append(self._once(code, received, rest))
            in_two += [self._in_two(parted, received, rest)] if parted.deferred else []
        forward, backward = self._shortest(both)
        total = sorted(f + b for f, b in both)
        into, split_s = self._parted(backward, both, in_two)
        spread = total[len(total) // 2] / max(total[0], 1e-9) - 1.0
        remade = self._remade(code, received, rest, repeats)
        at_work, returned = self._at_work(piece, received, rest, saved)
        workspace = max(at_work + grad_bytes(code), self._workspace_bytes(piece, received, rest, saved))
        waiting = self._waiting(parted, received, rest)
        return Sample(
            forward, into, backward - into, spread, workspace, *saved, remade, split_s, at_work, waiting,
            returned, cast_bytes(rest),
        )  # fmt: skip

    def _in_two(self, code: Code, received: list[Tensor], rest: list[object]) -> tuple[float, float, float]:
        """Seconds of one F, I and W, as `Stage` does them; between any two of them others run in a step."""
        inputs, pending = arguments(code, received, rest), Pending()
        leaves = [x for x in rest if isinstance(x, Tensor) and x.requires_grad]
        wanted = [*_wanted_at_once(code, inputs), pending.trigger]
        self.chill(leaves)
        for t in received:
            t.clone()
        start = self.clock()
        sent, _ = self._run(code, [*inputs, pending])
        forward_s = self.clock() - start
        heads = [t for t in sent if t.requires_grad]
        self.chill(leaves)
        grads = [torch.ones_like(t) for t in heads]
        start = self.clock()
        if heads:
            torch.autograd.backward(heads, grads, inputs=wanted)
        into_s = self.clock() - start
        self.chill(leaves)
        start = self.clock()
        pending.run()
        return forward_s, into_s, self.clock() - start

    def _parted(
        self,
        backward_s: float,
        whole: Sequence[tuple[float, float]],
        in_two: Sequence[tuple[float, float, float]],
    ) -> tuple[float, float]:
        """Of a whole backward the seconds that are those of I, and what all three take longer in two, turn by
        turn: between shortest times the difference would be mostly what else ran. Where no weight gradient
        waits, I is all of it."""
        if not in_two:
            return backward_s, 0.0
        back_s = self._call_s[1]
        into_s = min(seconds for _, seconds, _ in in_two) - back_s
        longer_s = statistics.median_low(sum(b) - sum(a) for a, b in zip(whole, in_two, strict=True)) - back_s
        return min(max(0.0, into_s), backward_s), max(0.0, longer_s)

    def _remade(self, code: Code, received: list[Tensor], rest: list[object], times: int) -> Remade | None:
        """What of it selective recomputation makes again, the shortest of some times."""
        code = selective(self.anatomy, code, sent_too=True)
        if code.selective is None:
            return None
        inputs, seconds = arguments(code, received, rest), []
        _, _, held = self._run(code, inputs)
        refill = placed(code, self.device).selective.refill  # type: ignore[union-attr]
        for _ in range(times):
            self.chill()
            start = self.clock()
            with torch.no_grad(), autocast(self.precision, self.device.type):
                refill(*inputs, *held)
            seconds.append(self.clock() - start)
        return Remade.of(code.selective, max(0.0, min(seconds) - self._call_s[0]))

    def _workspace_bytes(self, piece: Piece, received: list[Tensor], rest: list[object], saved: Saved) -> int:
        """What forward and backward hold at most beside what is saved: gradients on their way, and what the
        libraries take, a convolution several times its output. At least the piece's own estimate, as pages
        that were there already are not seen."""
        held = growth_bytes(lambda: self._once(piece.code, received, rest, False))
        return max(piece.workspace_bytes, held - _stash_bytes(piece, saved))

    def _at_work(
        self, piece: Piece, received: list[Tensor], rest: list[object], saved: Saved
    ) -> tuple[int, tuple[Parts, ...]]:
        """Of it what is tensors, but for the gradients of what is sent: another group, or a receive buffer,
        has these. And what it returns, as in `Sample`."""
        inputs, live = arguments(piece.code, received, rest), Live()
        returned: dict[StorageWeakRef, tuple[list[int], int]] = {}
        for i in (i for i, port in enumerate(piece.code.received) if port.needs_grad):

            def note(grad: Tensor, i: int = i) -> None:
                storage = grad.untyped_storage()
                returned.setdefault(StorageWeakRef(storage), ([], storage.nbytes()))[0].append(i)

            inputs[i].register_hook(note)  # type: ignore[attr-defined]
        with live:
            sent, _ = self._run(piece.code, inputs)
        grads = [torch.ones_like(t) for t in sent if t.requires_grad]
        edges = [get_gradient_edge(t) for t in sent if t.requires_grad]
        del sent  # as in a step, where what is not saved has left by then
        if edges:
            with live:
                torch.autograd.backward(edges, grads)
        shared = ((sorted(found), nbytes) for found, nbytes in returned.values())
        larger = (
            (tuple(found), nbytes)
            for found, nbytes in shared if nbytes > max(received[i].nbytes for i in found)
        )  # fmt: skip
        return max(0, live.most_bytes - _stash_bytes(piece, saved)), tuple(sorted(larger))

    def _waiting(self, code: Code, received: list[Tensor], rest: list[object]) -> Waiting:
        """Of split code: what is still there when nothing but the weight gradients needs it."""
        if not code.deferred:
            return Waiting()
        live, pending = Live(), Pending()
        given = [t.clone() for t in received]  # which this run alone holds, as its batch
        with live:
            batch = [x.clone() if isinstance(x, Tensor) else x for x in rest[: len(code.inputs)]]
        inputs = arguments(code, given, [*batch, *rest[len(batch) :]])
        wanted = [*_wanted_at_once(code, inputs), pending.trigger]
        with live:
            sent = self._run(code, [*inputs, pending])[0]
        heads = [i for i, t in enumerate(sent) if t.requires_grad]
        edges, grads = [get_gradient_edge(sent[i]) for i in heads], [torch.ones_like(sent[i]) for i in heads]
        of_given, of_sent = _storages(enumerate(given)), _storages(enumerate(sent))
        of_grads = _storages(zip(heads, grads, strict=True))
        del sent, given, batch, inputs
        if edges:
            with live:
                torch.autograd.backward(edges, grads, inputs=wanted)
        del edges, grads, wanted
        kept = (tuple(i for i, ref in of if not ref.expired()) for of in (of_given, of_sent, of_grads))
        return Waiting(live.beside({ref for _, ref in of_sent}), *kept)

    def _rest(self, code: Code) -> list[object]:
        """Every argument after the received tensors: batch, parameters, buffers, step and micro."""
        c = self.anatomy.captured
        specs = {key: n.meta["val"] for n, key in c.inputs.items()}
        inputs = [self._zeros(specs[key]) for key in code.inputs]
        leaves = []
        for name, _ in code.leaves:
            node = self.anatomy.node_of_param[name]
            leaf, trained = self._fill(spec_of(node)), needs_grad(node)
            if leaf.is_floating_point():  # a frozen one may hold integers
                leaf.mul_(0.02)
            leaves.append(leaf.requires_grad_(trained))
            share_casts(leaf)
            if trained:
                leaf.grad = torch.zeros_like(leaf)
        values = {name: n.meta["val"] for n, name in c.buffer.items()}
        buffers = [self._zeros(values[n]) for n in code.buffers]
        return [*inputs, *leaves, *buffers, *((0, 0) if code.random else ())]

    def _once(
        self, code: Code, received: list[Tensor], rest: list[object], chilled: bool = True
    ) -> tuple[float, float]:
        """Seconds of one forward and one backward. chilled: with the caches as in a step; else this is
        forward and backward, and nothing else."""
        inputs = arguments(code, received, rest)
        leaves = [x for x in rest if isinstance(x, Tensor) and x.requires_grad]
        if chilled:
            self.chill(leaves)
            for t in received:
                t.clone()  # what the group before has just made is in cache
        start = self.clock()
        sent, _ = self._run(code, inputs)
        middle = self.clock()
        heads = [t for t in sent if t.requires_grad]
        if chilled:
            self.chill(leaves)
        grads = [torch.ones_like(t) for t in heads]
        begin = self.clock()
        if heads:
            torch.autograd.backward(heads, grads)
        return middle - start, self.clock() - begin

    def _saved(self, piece: Piece, received: Sequence[Tensor], rest: Sequence[object]) -> Saved:
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(t: Tensor) -> Tensor:  # a part may differentiate in its forward
            storages.setdefault(storage_id(t), t.untyped_storage())
            return t.detach()  # which has no graph, and so does not keep itself

        inputs = arguments(piece.code, received, rest)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with hooks:
            sent, _ = self._run(piece.code, inputs)
        resident = [t for t in rest[len(piece.code.inputs) :] if isinstance(t, Tensor)]  # weights and buffers
        resident += [cast for t in resident for cast in casts_of(t)]
        of_received, of_sent = [storage_id(t) for t in received], [storage_id(t) for t in sent]
        known = {*map(storage_id, resident), *of_received, *of_sent}
        own = sum(storage.nbytes() for p, storage in storages.items() if p not in known)
        return (
            own,
            tuple(i for i, p in enumerate(of_received) if p in storages),
            tuple(i for i, p in enumerate(of_sent) if p in storages and p not in of_received),
        )

    def _zeros(self, like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=like.dtype, device=self.device)

    def _fill(self, spec: TensorSpec, port: Port | None = None) -> Tensor:
        dtype = getattr(torch, spec.dtype)
        if not dtype.is_floating_point:
            return torch.zeros(spec.shape, dtype=dtype, device=self.device)
        some = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0))  # again and again: quick
        n = math.prod(spec.shape)
        t = some.repeat(-(-n // _DRAWN))[:n].view(spec.shape).to(self.device, dtype)
        if port is None:
            return t
        return torch.empty_strided(spec.shape, port.stride, dtype=dtype, device=self.device).copy_(t)


def cast_bytes(rest: Iterable[object]) -> int:
    """Of the weights among these arguments, after a forward."""
    return sum(cast.nbytes for t in rest if isinstance(t, Tensor) for cast in casts_of(t))


def _stash_bytes(piece: Piece, saved: Saved) -> int:
    own, _, sent = saved
    return own + sum(piece.code.sent[i].spec.nbytes for i in sent)


def _wanted_at_once(code: Code, inputs: Sequence[object]) -> list[Tensor]:
    """Of the arguments of split code those whose gradients do not wait."""
    received, first = inputs[: len(code.received)], len(code.received) + len(code.inputs)
    leaves = zip(code.leaves, inputs[first:], strict=False)
    now = [*received, *(x for use, x in leaves if use not in (code.deferred or ()))]
    return [x for x in now if isinstance(x, Tensor) and x.requires_grad]


def _storages(numbered: Iterable[tuple[int, Tensor]]) -> list[tuple[int, StorageWeakRef]]:
    return [(i, StorageWeakRef(t.untyped_storage())) for i, t in numbered]


def arguments(
    code: Code, received: Sequence[Tensor], rest: Sequence[object], weights: bool = True
) -> list[object]:
    """Of one run: the received tensors as leaves of its own, then the rest; `weights=False`: of which nothing
    asks for a gradient."""
    inputs = [t.detach().requires_grad_(p.needs_grad) for t, p in zip(received, code.received, strict=True)]
    return [*inputs, *(x if weights or not isinstance(x, Tensor) else x.detach() for x in rest)]
