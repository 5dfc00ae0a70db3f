"""Tensors over a Communicator: receives posted ahead, sends tracked, buffers used again.

    Mailbox   posts the next k receives of a program in its order; `take` waits for one of them, and what is
              large and comes once per step goes on meanwhile
    Incoming  a large message in pieces, of which a few are expected at a time
    Outbox    keeps a sent tensor alive until its message has left
    Pool      receive buffers by shape, dtype and strides
    Landing   of tensors on an accelerator: the main memory that their messages leave from and arrive in
    Loopback  messages of a rank to itself, to be timed

A tensor travels as its bytes in memory order (bf16 as bf16), so both ends have the same strides.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpipipe.cluster.comm import Bytes, Communicator, Request
from mpipipe.graph.cut import Port
from mpipipe.graph.program import spec
from mpipipe.ops.device import CPU, here
from mpipipe.planner.exchange import BUCKETS_AHEAD
from mpipipe.values import Instr, Op, TensorSpec

Piece = tuple[Tensor, Callable[[Tensor], None] | None]  # room for it, and what is done with it


class Form(NamedTuple):
    """Shape, dtype and strides of a dense tensor."""

    spec: TensorSpec
    stride: tuple[int, ...]

    @classmethod
    def of(cls, t: Tensor | Port) -> Form:
        if isinstance(t, Port):
            return cls(t.spec, t.stride)
        return cls(spec(t), tuple(t.stride()))

    @classmethod
    def of_grad(cls, port: Port) -> Form:
        return cls(port.spec, port.grad_stride)

    def empty(self, device: torch.device | None = None) -> Tensor:
        """On the device of this rank, or another; beside a GPU in memory that it reads and writes itself."""
        dtype, device = getattr(torch, self.spec.dtype), device or here()
        pinned = device == CPU and here().type == "cuda"
        return torch.empty_strided(
            self.spec.shape, self.stride, dtype=dtype, device=device, pin_memory=pinned
        )

    def shape_like(self, t: Tensor) -> Tensor:
        """`t` itself if it has these strides, else a copy that has; of what is only marked as conjugate or
        negative, one that is."""
        if tuple(t.stride()) == self.stride or t.numel() <= 1:
            return t.resolve_conj().resolve_neg()
        return self.empty().copy_(t)


def flat(t: Tensor) -> Tensor:
    """A dense tensor as it lies in memory."""
    return torch.as_strided(t.detach(), (t.numel(),), (1,))


def as_bytes(t: Tensor) -> Bytes:
    """The memory of a dense tensor, without a copy."""
    return flat(t).view(torch.uint8).numpy()


class Pool:
    def __init__(self, device: torch.device | None = None) -> None:
        """device: None = that of this rank."""
        self._device = device
        self._free: dict[Form, list[Tensor]] = {}

    def take(self, form: Form) -> Tensor:
        free = self._free.get(form)
        if free:
            return free.pop()
        return form.empty(self._device)

    def give(self, t: Tensor) -> None:
        self._free.setdefault(Form.of(t), []).append(t.detach())


class Landing:
    """A tensor in main memory is its own."""

    def __init__(self) -> None:
        self._pool = Pool(CPU)

    def of(self, t: Tensor) -> Tensor:
        return t if t.is_cpu else self._pool.take(Form.of(t))

    def left(self, t: Tensor) -> Tensor:
        """With the values of a tensor that is to be sent."""
        landing = self.of(t)
        return landing if landing is t else landing.copy_(t.detach())

    def arrived(self, landing: Tensor, t: Tensor) -> None:
        """What a message has filled goes to its tensor."""
        if landing is not t:
            t.detach().copy_(landing)
            self._pool.give(landing)

    def give(self, landing: Tensor, t: Tensor) -> None:
        if landing is not t:
            self._pool.give(landing)


def _crosses(instr: Instr) -> bool:
    """Activations go one way and gradients the other. What comes once per step is waited for in its turn, and
    the library should hold none of it back."""
    return instr.micro >= 0


class Incoming:
    """A message in pieces, received in their order, all with one tag. At most `BUCKETS_AHEAD` have room at a
    time: the sender's later ones wait. `then` is called once all are taken."""

    def __init__(
        self, comm: Communicator, instr: Instr, pieces: Iterable[Piece], landing: Landing,
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._comm, self._instr, self._landing, self._pieces = comm, instr, landing, iter(pieces)
        self._then, self._posted = then, deque[tuple[Request, Tensor, Piece]]()
        for piece in itertools.islice(self._pieces, BUCKETS_AHEAD):
            self._post(piece)
        self._end()

    @property
    def whole(self) -> bool:
        """May be asked by another thread."""
        return not self._posted

    def first(self) -> list[Request]:
        """Of the piece that is taken next; empty after the last one."""
        return [request for request, _, _ in itertools.islice(self._posted, 1)]

    def advance(self) -> None:
        """Takes what has arrived, without waiting."""
        while self.take_next():
            pass

    def take_next(self) -> bool:
        """Takes the next piece if it has arrived; whether it had."""
        if not self._posted or not self._posted[0][0].done():
            return False
        self._use(*self._posted.popleft())  # and lets go of it: the next one may have its memory
        if (piece := next(self._pieces, None)) is not None:
            self._post(piece)
        self._end()
        return True

    def _end(self) -> None:
        if self.whole and self._then is not None:
            self._then()

    def _use(self, _: Request, at: Tensor, piece: Piece) -> None:
        t, then = piece
        self._landing.arrived(at, t)
        if then is not None:
            then(t)

    def _post(self, piece: Piece) -> None:
        at = self._landing.of(piece[0])
        request = self._comm.irecv(as_bytes(at), self._instr.peer, self._instr.tag)
        self._posted.append((request, at, piece))


class Mailbox:
    """Receives of one program run. `targets(instr)` gives the tensors that an instruction fills.

    A tied gradient, as large as an embedding, is posted ahead like the others, so that it can come during
    the last backward; the proof assumes less. What else comes once per step is posted when it is taken, or
    before: by `post` updates, which land in weights that nothing reads any more, by `expect` the sums of
    other copies, of which little is here at a time.

    Whatever is waited for, what is expected comes in meanwhile, and what `outbox` holds back leaves.
    """

    def __init__(
        self,
        comm: Communicator,
        instrs: Sequence[Instr],
        window: int,
        targets: Callable[[Instr], list[Tensor]],
        landing: Landing,
        outbox: Outbox,
    ) -> None:
        self._comm, self._window, self._targets, self._landing = comm, max(1, window), targets, landing
        self._outbox = outbox
        self._waiting = deque(i for i in instrs if i.micro >= 0 or i.op == Op.RECV_TIED)
        self._posted: dict[Instr, list[tuple[Tensor, Tensor, Request]]] = {}  # where it lands, and goes
        self._incoming: dict[Instr, Incoming] = {}
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._posted) < self._window:
            self.post(self._waiting.popleft())

    def post(self, instr: Instr) -> None:
        lands = [(self._landing.of(t), t) for t in self._targets(instr)]
        self._posted[instr] = [
            (at, t, self._comm.irecv(as_bytes(at), instr.peer, instr.tag, _crosses(instr))) for at, t in lands
        ]

    def expect(self, instr: Instr, pieces: Iterable[Piece], then: Callable[[], None] | None = None) -> None:
        """From now on; all of it is there after `finish`. then: what is done as soon as it is, be it while
        this rank waits for something else; it may expect more, and waits for nothing."""
        self._incoming[instr] = Incoming(self._comm, instr, pieces, self._landing, then)

    def advance(self) -> None:
        """Takes what has arrived of what is expected."""
        for incoming in list(self._incoming.values()):
            incoming.advance()

    def finish(self, instr: Instr) -> None:
        incoming = self._incoming[instr]
        while incoming.first():
            self._wait(*incoming.first())
            incoming.take_next()
        del self._incoming[instr]

    def pending(self) -> list[Instr]:
        """Receives that are posted and not taken; may be asked by another thread."""
        expected = list(self._incoming.items())
        return [*list(self._posted), *(instr for instr, incoming in expected if not incoming.whole)]

    def take(self, instr: Instr) -> list[Tensor]:
        """The tensors of a receive, waited for; the next receive is posted in its place."""
        if instr not in self._posted:
            self.post(instr)
        for _, _, request in self._posted[instr]:
            self._wait(request)
        arrived = self._posted.pop(instr)
        for at, t, _ in arrived:
            self._landing.arrived(at, t)
        self._fill()
        return [t for _, t, _ in arrived]

    def _wait(self, request: Request) -> None:
        """One piece is added at a time: then what is waited for may be there, and comes first."""
        expected = self._incoming.values()
        while others := [*self._outbox.first(), *itertools.chain(*(i.first() for i in expected))]:
            self._comm.wait(request, *others)
            if request.done():
                return
            self._outbox.drop_sent()
            any(incoming.take_next() for incoming in list(expected))
        self._comm.wait(request)


class Outbox:
    """What is sent once per step, as large as an embedding, starts when the messages of micro-batches before
    it have left: on one line it would hold up the last gradient, for which another rank waits."""

    def __init__(self, comm: Communicator, landing: Landing) -> None:
        self._comm, self._landing = comm, landing
        self._sent, self._once = deque[_Sent](), deque[_Sent]()
        self._later: deque[tuple[Sequence[Tensor], Instr]] = deque()

    def send(self, tensors: Sequence[Tensor], instr: Instr, then: Callable[[], None] | None = None) -> None:
        """Without waiting; `then` runs when the last tensor has left, of a micro-batch's message."""
        if instr.micro < 0:
            self._later.append((tensors, instr))
        else:
            self._sent += self._started(tensors, instr, then)
        self.drop_sent()

    def drop_sent(self) -> None:
        """Lets go of the tensors of messages that have left, in their order; starts what waited for that."""
        for sent in (self._sent, self._once):
            while sent and sent[0].request.done():
                self._leave(sent)
        if not self._sent:
            self._start_later()

    def leave_at_most(self, messages: int) -> None:
        """Waits until no more of micro-batches have not left: so far a rank may be ahead of the next one."""
        while len({sent.instr for sent in self._sent}) > messages:
            self._comm.wait(self._sent[0].request)
            self._leave(self._sent)

    def first(self) -> list[Request]:
        """Of the message that leaves next, where others are held back until then."""
        return [self._sent[0].request] if self._later else []

    def pending(self) -> list[Instr]:
        """Of the messages that may not have left; may be asked by another thread."""
        sent = [*list(self._sent), *list(self._once)]
        return [*(message.instr for message in sent), *(instr for _, instr in list(self._later))]

    def start_all(self) -> None:
        """Before this rank waits for what comes once per step."""
        self._wait(self._sent)
        self._start_later()

    def wait_all(self) -> None:
        self.start_all()
        self._wait(self._once)

    def _start_later(self) -> None:
        while self._later:
            self._once += self._started(*self._later.popleft())

    def _started(
        self, tensors: Sequence[Tensor], instr: Instr, then: Callable[[], None] | None = None
    ) -> Iterator[_Sent]:
        for i, t in enumerate(tensors):
            leaves = self._landing.left(t)
            request = self._comm.isend(as_bytes(leaves), instr.peer, instr.tag, _crosses(instr))
            yield _Sent(request, leaves, t, then if i == len(tensors) - 1 else None, instr)

    def _wait(self, sent: deque[_Sent]) -> None:
        while sent:
            self._comm.wait(sent[0].request)
            self._leave(sent)

    def _leave(self, sent: deque[_Sent]) -> None:
        left = sent.popleft()
        self._landing.give(left.leaves, left.tensor)
        if left.then is not None:
            left.then()


class _Sent(NamedTuple):
    request: Request
    leaves: Tensor  # from here
    tensor: Tensor
    then: Callable[[], None] | None
    instr: Instr


class Loopback:
    """Tensors with next to no bytes. No other message of a rank has this way, so any tag will do."""

    def __init__(self, comm: Communicator, n_tensors: int) -> None:
        self._to, landing = Instr(Op.SEND_ACT, 0, 0, 0, comm.rank, 0), Landing()
        self._tensors, self._pool = [torch.zeros(1, device=here()) for _ in range(n_tensors)], Pool()
        self._outbox = Outbox(comm, landing)
        self._mailbox = Mailbox(comm, [], 1, self._targets, landing, self._outbox)

    def _targets(self, _: Instr) -> list[Tensor]:
        return [self._pool.take(Form.of(t)) for t in self._tensors]

    def exchange(self) -> None:
        self._outbox.send(self._tensors, self._to)
        for t in self._mailbox.take(self._to._replace(op=Op.RECV_ACT)):
            self._pool.give(t)
        self._outbox.wait_all()  # MPI may have kept it back until the receive was posted
