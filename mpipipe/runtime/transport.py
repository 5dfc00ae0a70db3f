"""Tensors over a Communicator: receives posted ahead, sends tracked, buffers used again.

    Mailbox   posts the next k receives of a program in its order; `take` waits for one of them
    Outbox    keeps a sent tensor alive until its message has left
    Pool      receive buffers by shape, dtype and strides
    Landing   of tensors on an accelerator: the main memory that their messages leave from and arrive in
    Loopback  messages of a rank to itself, to be timed

A tensor travels as its bytes in memory order (bf16 as bf16), so both ends have the same strides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpipipe.cluster.comm import Bytes, Communicator, Request
from mpipipe.graph.cut import Port
from mpipipe.graph.program import spec
from mpipipe.ops.device import CPU, here
from mpipipe.values import Instr, Op, TensorSpec


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
        """`t` itself if it has these strides, else a copy that has."""
        if tuple(t.stride()) == self.stride or t.numel() <= 1:
            return t
        return self.empty().copy_(t)


def as_bytes(t: Tensor) -> Bytes:
    """The memory of a dense tensor, without a copy."""
    flat = torch.as_strided(t.detach(), (t.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


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


class Mailbox:
    """Receives of one program run. `targets(instr)` gives the tensors that an instruction fills.

    A tied gradient, as large as an embedding, is posted ahead like the others, so that it can come during
    the last backward; the proof assumes less. What else comes once per step is posted when it is taken, or by
    `post`: copies and updates land in weights, which are read until then, and shards would stand beside the
    last backward's tensors.
    """

    def __init__(
        self,
        comm: Communicator,
        instrs: Sequence[Instr],
        window: int,
        targets: Callable[[Instr], list[Tensor]],
        landing: Landing,
    ) -> None:
        self._comm, self._window, self._targets, self._landing = comm, max(1, window), targets, landing
        self._waiting = deque(i for i in instrs if i.micro >= 0 or i.op == Op.RECV_TIED)
        self._posted: dict[Instr, list[tuple[Tensor, Tensor, Request]]] = {}  # where it lands, and goes
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._posted) < self._window:
            self.post(self._waiting.popleft())

    def post(self, instr: Instr) -> None:
        lands = [(self._landing.of(t), t) for t in self._targets(instr)]
        self._posted[instr] = [
            (at, t, self._comm.irecv(as_bytes(at), instr.peer, instr.tag)) for at, t in lands
        ]

    def pending(self) -> list[Instr]:
        """Receives that are posted and not taken; may be asked by another thread."""
        return list(self._posted)

    def take(self, instr: Instr) -> list[Tensor]:
        """The tensors of a receive, waited for; the next receive is posted in its place."""
        if instr not in self._posted:
            self.post(instr)
        for _, _, request in self._posted[instr]:
            self._comm.wait(request)
        arrived = self._posted.pop(instr)
        for at, t, _ in arrived:
            self._landing.arrived(at, t)
        self._fill()
        return [t for _, t, _ in arrived]


class Outbox:
    def __init__(self, comm: Communicator, landing: Landing) -> None:
        self._comm, self._landing = comm, landing
        self._sent: deque[tuple[Request, Tensor, Tensor, Callable[[], None] | None, Instr]] = deque()

    def send(self, tensors: Sequence[Tensor], instr: Instr, then: Callable[[], None] | None = None) -> None:
        """Sends without waiting; `then` runs when the last tensor has left. What is sent once per step, as
        large as an embedding, starts when the messages before it have left: on one line it would hold up the
        last gradient, for which another rank waits."""
        if instr.micro < 0:
            self.wait_all()
        for i, t in enumerate(tensors):
            leaves = self._landing.left(t)
            request = self._comm.isend(as_bytes(leaves), instr.peer, instr.tag)
            self._sent.append((request, leaves, t, then if i == len(tensors) - 1 else None, instr))
        self.drop_sent()

    def drop_sent(self) -> None:
        """Lets go of the tensors of messages that have left, in their order."""
        while self._sent and self._sent[0][0].done():
            self._leave()

    def pending(self) -> list[Instr]:
        """Of the messages that may not have left; may be asked by another thread."""
        return [instr for *_, instr in list(self._sent)]

    def wait_all(self) -> None:
        while self._sent:
            self._comm.wait(self._sent[0][0])
            self._leave()

    def _leave(self) -> None:
        _, leaves, t, then, _ = self._sent.popleft()
        self._landing.give(leaves, t)
        if then is not None:
            then()


class Loopback:
    """Tensors with next to no bytes. No other message of a rank has this way, so any tag will do."""

    def __init__(self, comm: Communicator, n_tensors: int) -> None:
        self._to, landing = Instr(Op.SEND_ACT, 0, 0, 0, comm.rank, 0), Landing()
        self._tensors, self._pool = [torch.zeros(1, device=here()) for _ in range(n_tensors)], Pool()
        self._outbox = Outbox(comm, landing)
        self._mailbox = Mailbox(comm, [], 1, self._targets, landing)

    def _targets(self, _: Instr) -> list[Tensor]:
        return [self._pool.take(Form.of(t)) for t in self._tensors]

    def exchange(self) -> None:
        self._outbox.send(self._tensors, self._to)
        for t in self._mailbox.take(self._to._replace(op=Op.RECV_ACT)):
            self._pool.give(t)
        self._outbox.wait_all()  # MPI may have kept it back until the receive was posted
