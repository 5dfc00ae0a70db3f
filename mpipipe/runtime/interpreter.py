"""The loop: one rank runs its instructions, in order, and times each.

Everything parallel was decided before (schedule, lower, prove); here is one handler per op. The same
loop trains, evaluates and predicts, over MPI or over threads.

    values in flight, by (stage, micro-batch):
      act    received or handed over, waiting for F        out   made by F, waiting for SEND_ACT
      grad   received or handed over, waiting for B or I   back  made by B or I, waiting for SEND_GRAD
      lent   read by I, and once more by W
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from mpipipe.cluster.comm import Communicator
from mpipipe.errors import DataError, MpipipeError, first_line
from mpipipe.graph.cut import Code, Leaf
from mpipipe.graph.program import Batch, Mode
from mpipipe.graph.source import TRACING
from mpipipe.graph.variants import Variants
from mpipipe.ops import device
from mpipipe.runtime.copies import Copies, of_all_copies
from mpipipe.runtime.feed import Source
from mpipipe.runtime.optimizer import Optimizer, clip_coefficient, norms, total_dtype
from mpipipe.runtime.outside import outside
from mpipipe.runtime.stage import Stage
from mpipipe.runtime.ties import Ties, take_gradients
from mpipipe.runtime.transport import Form, Landing, Mailbox, Outbox, Pool
from mpipipe.runtime.weights import BlockSums, Tree
from mpipipe.values import COMPUTE, RECVS, Float64, Instr, Int64, Numerics, Op, Program

Key = tuple[int, int]  # (stage, micro-batch)


@dataclass
class Job:
    """What one run of a program is about."""

    mode: Mode
    step: int
    source: Source  # of its micro-batches
    stop: bool = False  # this rank was asked to stop


@dataclass
class Outcome:
    """loss, weight: sums over the step, on every rank of a training step. By micro-batch, on the rank whose
    last stage it has passed: values, the loss and in evaluation the sums of `Captured.outputs[1:]`; weights,
    of the loss; predictions."""

    times: Float64  # (instructions, 2): start and end, perf_counter seconds
    memory_bytes: Int64  # (instructions,): resident at the end of each, a message like what was before it
    data_s: Float64  # (instructions,): of each, what it has waited for its samples
    loss: float = 0.0
    weight: float = 0.0
    norm: float = 0.0
    stop: bool = False  # some rank was asked to stop
    not_finite: tuple[str, ...] = ()  # the parameters whose gradient is not, in canonical order
    values: dict[int, list[float]] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    predictions: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """Of training: there is a finite loss to update the weights by."""
        return not self.not_finite and math.isfinite(self.loss) and 0 < self.weight < math.inf


class Interpreter:
    """One rank. `stages` are its own; the rest is the same on every rank. `resident_bytes` says how much
    memory it holds; `int` says 0."""

    def __init__(
        self,
        comm: Communicator,
        variants: Variants,
        cuts: Sequence[str],
        stages: dict[int, Stage],
        ties: Ties,
        numerics: Numerics,
        optimizer: Optimizer,
        resident_bytes: Callable[[], int] = int,
    ) -> None:
        self.comm, self.variants, self.cuts = comm, variants, tuple(cuts)
        self.stages, self.ties, self.resident_bytes = stages, ties, resident_bytes
        self._data_s = 0.0  # that the instruction which runs has waited for its samples
        self.job: Job
        self._unfinished = False  # a run of a program has begun and not ended
        self._torn = False  # some weights are those of the next step
        self.numerics, self.clip = numerics, optimizer.clip
        self.updaters = {s: optimizer.attach(stage.weights) for s, stage in stages.items()}
        self.n_stages = len(cuts) + 1
        self.pool, self.landing = Pool(), Landing()
        self.outbox = Outbox(comm, self.landing)
        self.blocks = {
            s: [BlockSums(sums.tensors) for sums in stage.weights.shares] for s, stage in stages.items()
        }
        self.updates = {s: variants.code("train", variants.first, cuts, s).updates for s in stages}
        # only of what has a gradient, as torch does it: a zero between norms changes how their sum is rounded
        self.position = {name: i for i, name in enumerate(variants.trained)}
        self.norm_dtype = total_dtype(variants.source.params[name].dtype for name in variants.trained)
        self._handlers = {
            Op.F: self._forward, Op.B: self._backward, Op.NORM: self._norm, Op.STEP: self._step,
            Op.I: self._backward_input, Op.W: self._backward_weight,
            Op.SEND_ACT: self._send_act, Op.RECV_ACT: self._recv_act,
            Op.SEND_GRAD: self._send_grad, Op.RECV_GRAD: self._recv_grad,
            Op.SEND_TIED: self._send_tied, Op.RECV_TIED: self._recv_tied,
            Op.SEND_COPY: self._send_copy, Op.RECV_COPY: self._recv_copy,
            Op.SEND_SHARD: self._send_shard, Op.RECV_SHARD: self._recv_shard,
            Op.SEND_UPDATE: self._send_update, Op.RECV_UPDATE: self._recv_copy,
        }  # fmt: skip

    def run(self, program: Program, job: Job) -> Outcome:
        """Runs this rank's part of `program`; collective over the ranks of the program."""
        instrs = program.instrs(self.comm.rank)
        self._begin(program, job, instrs)
        self._unfinished = True
        held = self.resident_bytes()
        for i, instr in enumerate(instrs):
            self.outcome.times[i, 0] = time.perf_counter()
            try:
                with TRACING if instr.op in COMPUTE else nullcontext():
                    self._handlers[instr.op](instr)
                device.finish()
            except Exception as error:
                where = f"rank {self.comm.rank}, stage {instr.stage}, instruction {instr}"
                error.add_note(f"in {where} ({i + 1} of {len(instrs)}), {job.mode} step {job.step}")
                raise
            self.outcome.times[i, 1] = time.perf_counter()
            if instr.op == Op.SEND_SHARD and instr in self.early:
                self.outcome.times[i] = self.early[instr]
            if instr.op in COMPUTE:  # asking takes 20 us beside cold caches, as long as a small message
                self.outcome.data_s[i], self._data_s = self._data_s, 0.0
                held = self.resident_bytes()
                self._move_on()
            self.outcome.memory_bytes[i] = held
            if instr.op == Op.NORM and not self.outcome.sound:
                self._forget_step()
                break
        self.outbox.wait_all()
        self._unfinished = self._torn = False
        return self.outcome

    def check_whole(self) -> None:
        """Raises MpipipeError where the last step was broken off while it updated the weights."""
        if self._torn:
            raise MpipipeError(
                f"step {self.job.step} was broken off while it updated the weights, of which only some are "
                "new; go on from a checkpoint (resume=)"
            )

    def _begin(self, program: Program, job: Job, instrs: Sequence[Instr]) -> None:
        """What belongs to one run alone. Raises MpipipeError where the one before was broken off, and left
        what cannot be put back."""
        self.check_whole()
        if self._unfinished and self.comm.size > 1:
            raise MpipipeError(
                f"{self.job.mode} step {self.job.step} was broken off, and messages of it may still be under "
                "way; start again from a checkpoint (resume=)"
            )
        if self._unfinished:  # somebody has caught what broke it off, such as a Ctrl-C, and goes on
            self._forget_step()
        self.job, self.program = job, program
        for stage in self.stages.values():  # the weights may have been written meanwhile
            stage.weights.forget_casts()
        self.copy, self.served = program.copy_on(self.comm.rank), program.copies_on(self.comm.rank)
        self.share = program.share_on(self.comm.rank)
        self.rank_of_stage = program.copies[self.served.start]  # the same ones are this one in all of them
        self.copies = {s: Copies(at, self.updates[s], program.nodes_of(s)) for s, at in self.stages.items()}
        sends = [i for i in instrs if i.op == Op.SEND_SHARD]
        self.rounds = {s: deque(i for i in sends if i.stage == s) for s in self.stages}  # not begun
        self.early: dict[Instr, float] = {}  # when those were begun that were before their turn
        n_served = len(self.served)
        self.trees = {s: Tree(at.weights.shares[0].tensors, n_served) for s, at in self.stages.items()}
        self.undone = dict.fromkeys(self.stages, len(self.share))  # micro-batches
        firsts = [self._block_of(program.share(copy).start) for copy in self.served]
        self.running = {s: list(firsts) for s in self.stages}  # block that each of its shares is summing up
        n = len(instrs)
        self.outcome = Outcome(np.zeros((n, 2)), np.zeros(n, np.int64), np.zeros(n))
        self.act: dict[Key, list[Tensor]] = {}
        self.out: dict[Key, list[Tensor]] = {}
        self.grad: dict[Key, list[Tensor]] = {}
        self.back: dict[Key, list[Tensor]] = {}
        self.lent: dict[Key, list[Tensor]] = {}
        self.in_two = {(i.stage, i.micro) for i in instrs if i.op == Op.I}
        self.held: dict[Key, list[Tensor]] = {}  # received activations, until nothing reads them
        self.arrived: dict[Leaf, Tensor] = {}  # gradients of tied parameters
        self.tied_out: dict[Key, dict[Leaf, Tensor]] = {}
        self.losses: dict[int, Tensor] = {}  # which backward may have to put there
        self.factor: float | None = None
        receives = [i for i in instrs if i.op in RECVS]
        self.mailbox = Mailbox(
            self.comm, receives, program.receive_window, self._targets, self.landing, self.outbox
        )
        self._start_weights()

    def code(self, stage: int, micro: int) -> Code:
        return self.variants.code(self.job.mode, self.job.source.specs[micro], self.cuts, stage)

    # -- compute -------------------------------------------------------------------------------

    def _start_weights(self) -> None:
        """The weight of each micro-batch, and in training of the step, known from the batch alone, where the
        loss is."""
        if self.n_stages - 1 not in self.stages or self.job.mode == "predict":
            return
        weights = self.outcome.weights
        for micro in self.share:
            code = self.variants.weight(self.job.mode, self.job.source.specs[micro])
            if isinstance(code, Code):
                batch = self.job.source.peek(micro, frozenset(code.inputs))
                (value,), _ = code.forward(*(batch[k].contiguous() for k in code.inputs))  # in main memory
                weights[micro] = float(value)
            else:
                weights[micro] = code
        if self.job.mode != "train":
            return
        every = of_all_copies(self.comm, self.program, [weights[micro] for micro in self.share])
        self.outcome.weight = added(every)
        self._seeds: dict[torch.dtype, Tensor] = {}

    def _seed(self, loss: Tensor) -> Tensor:
        """The gradient of the step's loss by the sum of a micro-batch: 1 / weight, rounded as torch divides
        a loss of this dtype."""
        if loss.dtype not in self._seeds:
            ones = torch.ones((), dtype=torch.promote_types(loss.dtype, torch.float32))
            self._seeds[loss.dtype] = (ones / self.outcome.weight).to(device.here(), loss.dtype)
        return self._seeds[loss.dtype].reshape(loss.shape)

    def _forward(self, i: Instr) -> None:
        key, code, train = (i.stage, i.micro), self.code(i.stage, i.micro), self.job.mode == "train"
        batch = self._samples(i.micro, code) if code.inputs else {}
        received = self.act.pop(key, [])
        if train:
            lets_go, specs = self.stages[i.stage].recompute == "selective", self.job.source.specs[i.micro]
            code = self.variants.training_code(specs, self.cuts, i.stage, key in self.in_two, lets_go)
        try:
            sent = self.stages[i.stage].forward(code, i.micro, received, batch, self.job.step, train)
        except (IndexError, ValueError, RuntimeError) as error:
            self._refuse(i, batch, error)
            raise
        if i.stage < self.n_stages - 1:
            self._hand_over(self.act, self.out, (i.stage, i.micro), i.stage + 1, sent)
        elif self.job.mode == "predict":
            self.outcome.predictions[i.micro] = [t.to("cpu", copy=True) for t in sent]
        elif train:
            self.losses[i.micro] = sent[0]
            self.grad[key] = [self._seed(sent[0])]
        else:
            self.outcome.values[i.micro] = [float(t) for t in sent]
        if not train and key not in self.out:
            self._release(key)

    def _refuse(self, i: Instr, batch: Batch, error: Exception) -> None:
        """Raises DataError where the batch is to blame for what a forward raised."""
        job = self.job
        captured = self.variants.anatomy(job.mode, job.source.specs[i.micro]).captured
        before = {key: sum(specs[key].shape[0] for specs in job.source.specs[: i.micro]) for key in batch}
        if found := outside(captured, batch, before, job.source.name_of):
            why = f"{type(error).__name__}: {first_line(error)}"
            raise DataError(f"{job.mode} step {job.step}: {found}\n  {why}") from error

    def _samples(self, micro: int, code: Code) -> Batch:
        started = time.perf_counter()
        batch = self.job.source.take(micro, frozenset(code.inputs))
        self._data_s = time.perf_counter() - started
        return batch

    def _backward(self, i: Instr) -> None:
        key, stage = (i.stage, i.micro), self.stages[i.stage]
        grads = self.grad.pop(key)
        assert self._ahead(i) is None, "it would be added to the sums of an earlier block"
        self._add_apart(i)
        back = stage.backward(i.micro, grads)
        self._free(key, grads)
        self._pass_back(key, back)
        self._weights_done(i)

    def _backward_input(self, i: Instr) -> None:
        key = i.stage, i.micro
        self.lent[key] = self.grad.pop(key)
        self._add_apart(i)
        self._pass_back(key, self.stages[i.stage].backward_input(i.micro, self.lent[key], self._ahead(i)))

    def _backward_weight(self, i: Instr) -> None:
        key = i.stage, i.micro
        self._add_apart(i)
        self.stages[i.stage].backward_weight(i.micro)
        self._free(key, self.lent.pop(key))
        self._weights_done(i)

    def _free(self, key: Key, grads: list[Tensor]) -> None:
        """Receive buffers that backward has read for the last time."""
        stage, _ = key
        if stage < self.n_stages - 1 and self.rank_of_stage[stage + 1] != self.comm.rank:
            for g in grads:
                self.pool.give(g)
        if grads:
            self._release(key)
        else:  # nothing came back for it, so what was relayed may still be on its way: not into the pool
            self.held.pop(key, None)

    def _pass_back(self, key: Key, back: list[Tensor]) -> None:
        stage, micro = key
        if stage > 0:
            wanted = [Form.of_grad(p) for p in self.code(stage, micro).received if p.needs_grad]
            back = [form.shape_like(g) for form, g in zip(wanted, back, strict=True)]
            self._hand_over(self.grad, self.back, key, stage - 1, back)

    def _weights_done(self, i: Instr) -> None:
        if self.numerics.tied == "eager":
            self._merge_eager((i.stage, i.micro))
        self._end_of_block(i)

    def _hand_over(
        self,
        local: dict[Key, list[Tensor]],
        remote: dict[Key, list[Tensor]],
        key: Key,
        to: int,
        tensors: list[Tensor],
    ) -> None:
        if self.rank_of_stage[to] != self.comm.rank:
            remote[key] = tensors
            return
        local[to, key[1]] = tensors
        shown = {t.untyped_storage().data_ptr() for t in tensors}
        if key in self.held:  # what is passed on as it is outlives this stage's use of it: not into the pool
            held = self.held[key]
            self.held[key] = [t for t in held if t.untyped_storage().data_ptr() not in shown]

    def _merge_eager(self, key: Key) -> None:
        stage, micro = key
        taken = take_gradients(self.stages[stage].weights)
        self.tied_out[key] = {leaf: g for leaf, g in taken.items() if self.ties.owner[leaf[0]] != stage}
        parts = {**self.arrived, **taken}
        for other in self.stages:  # uses on other stages of this rank
            here = self.tied_out.get((other, micro), {}) if other != stage else {}
            parts |= {leaf: here.pop(leaf) for leaf in list(here) if self.ties.owner[leaf[0]] == stage}
        self.ties.merge_micro(self.stages[stage].weights, parts)
        self._return_arrived(stage)

    def _served_of(self, micro: int) -> int:
        """Whose sums a micro-batch adds to, of the copies of the pipeline that this rank is in, from 0."""
        if self.numerics.reduce == "fast":
            return 0
        return (micro - self.share.start) * len(self.served) // len(self.share)

    def _add_apart(self, i: Instr) -> None:
        self.stages[i.stage].weights.add_to(self._served_of(i.micro))

    def _block_of(self, micro: int) -> int:
        return micro * self.numerics.blocks // self.program.n_micro

    def _ahead(self, i: Instr) -> tuple[int, int] | None:
        """The share and the block of a micro-batch whose share is still summing up an earlier one."""
        served, block = self._served_of(i.micro), self._block_of(i.micro)
        return (served, block) if block > self.running[i.stage][served] else None

    def _end_of_block(self, i: Instr) -> None:
        n_blocks, done, n_copies = self.numerics.blocks, i.micro + 1, self.stages[i.stage].weights.n_copies
        self.undone[i.stage] -= 1
        if self.undone[i.stage] == 0 and self.numerics.reduce == "fast" and n_copies > 1:
            self.copies[i.stage].begin()
        if n_blocks == 1 or done % (self.program.n_micro // n_blocks):
            return
        served = self._served_of(i.micro)
        blocks, weights = self.blocks[i.stage][served], self.stages[i.stage].weights
        last = done == self.program.share(self.served[served]).stop
        if not last or len(self.program.copies) == 1:
            blocks.end_of_block()
            if last:
                blocks.finish()
            else:
                self.running[i.stage][served] += 1
                self.stages[i.stage].begin((served, self.running[i.stage][served]))
            return
        blocks.whole_sub_tree()
        if len(self.served) > 1:
            self.trees[i.stage].add(served, weights.shares[served].tensors)
            if self.undone[i.stage] == 0:
                weights.begin_again()
        if self.undone[i.stage] == 0 and weights.n_copies > 1:
            self.copies[i.stage].begin()

    def _norm(self, _: Instr) -> None:
        self.outbox.start_all()
        if self.numerics.tied == "per_use" and self.copy == 0:  # which owns all tied parameters
            for stage in self.stages.values():
                self.arrived.update(stage.weights.extra)
            for stage in self.stages.values():
                self.ties.merge_step(stage.weights, self.arrived)
            self.arrived.clear()  # not pooled: the size of an embedding, and the update needs room
        self.outcome.values = {micro: [float(loss)] for micro, loss in self.losses.items()}
        losses, all_norms = np.zeros(self.program.n_micro), np.zeros(len(self.position))
        for micro, row in self.outcome.values.items():
            losses[micro] = row[0]
        for stage in self.stages.values():
            own = (group.grad for group in stage.weights.own_groups)
            for name, value in norms(own, self.numerics.bits).items():
                all_norms[self.position[name]] = value
        weight = 0.0 if self.copy else self.outcome.weight
        self._agree(self.comm.allgather_array(np.concatenate([[weight, self.job.stop], losses, all_norms])))
        self.outbox.wait_all()  # received by now: STEP writes where they were sent from

    def _agree(self, rows: Float64) -> None:
        """Every rank reads the same loss, norm and wish to stop out of the one collective."""
        total = np.sum(rows, axis=0)  # exact: at most one rank has a value in each column but "stop"
        losses, all_norms = np.split(total[2:], [self.program.n_micro])
        self.outcome.loss, self.outcome.weight = added(losses.tolist()), float(total[0])
        self.outcome.stop = total[1] > 0
        if not (finite := np.isfinite(all_norms)).all():
            pairs = zip(self.position, finite, strict=True)
            self.outcome.not_finite = tuple(name for name, good in pairs if not good)
        self.outcome.norm, factor = clip_coefficient(all_norms.tolist(), self.clip or np.inf, self.norm_dtype)
        self.factor = factor if self.clip is not None else None

    def _forget_step(self) -> None:
        """Instead of the update: weights, statistics and accumulators are as before the step."""
        for s, stage in self.stages.items():
            stage.forget()
            for blocks in self.blocks[s]:
                blocks.forget()

    def _step(self, i: Instr) -> None:
        stage = self.stages[i.stage]
        self._torn = True
        stage.weights.forget_casts()
        self.updaters[i.stage].update(self.job.step, self.factor)
        others = (g.grad.buffer for g in stage.weights.groups if g.owner != self.copy)
        for accumulator in (*others, *stage.weights.extra.values()):
            accumulator.zero_()
        if self.copy == 0:
            stage.apply_statistics()
        else:
            stage.forget_statistics()

    # -- messages ------------------------------------------------------------------------------

    def _targets(self, i: Instr) -> list[Tensor]:
        """What a receive fills."""
        if i.op == Op.RECV_COPY:
            data = self.stages[i.stage].weights.data
            return [data[name] for name in self.ties.params_between(i.stage, i.other)]
        if i.op == Op.RECV_TIED:
            weights = self.stages[i.stage].weights
            return [
                weights.grad[name] if name in weights.rows else self.pool.take(Form.of(weights.data[name]))
                for name, _ in self.ties.between(i.other, i.stage)
            ]
        if i.op == Op.RECV_UPDATE:
            return self.copies[i.stage].updated_by(self.program.copy_on(i.peer))
        code = self.code(i.stage, i.micro)
        if i.op == Op.RECV_ACT:
            forms = [Form.of(port) for port in code.received]
        else:
            forms = [Form.of_grad(port) for port in code.sent if port.needs_grad]
        return [self.pool.take(form) for form in forms]

    def _recv_act(self, i: Instr) -> None:
        tensors = self.mailbox.take(i)
        self.act[i.stage, i.micro] = tensors
        self.held[i.stage, i.micro] = tensors

    def _recv_grad(self, i: Instr) -> None:
        self.grad[i.stage, i.micro] = self.mailbox.take(i)
        self.outbox.drop_sent()  # as a rule the activation that this is the answer to

    def _recv_tied(self, i: Instr) -> None:
        if i.micro < 0:
            self.outbox.start_all()
        self.arrived.update(zip(self.ties.between(i.other, i.stage), self.mailbox.take(i), strict=True))

    def _recv_copy(self, i: Instr) -> None:
        self.outbox.start_all()
        self.mailbox.take(i)

    def _send_act(self, i: Instr) -> None:
        key, train = (i.stage, i.micro), self.job.mode == "train"
        forms = [Form.of(port) for port in self.code(i.stage, i.micro).sent]
        tensors = [form.shape_like(t) for form, t in zip(forms, self.out.pop(key), strict=True)]
        self.outbox.send(tensors, i, None if train else lambda: self._release(key))
        if not train:  # where no answer is awaited
            self.outbox.leave_at_most(self.program.receive_window)

    def _send_grad(self, i: Instr) -> None:
        self.outbox.send(self.back.pop((i.stage, i.micro)), i)

    def _send_tied(self, i: Instr) -> None:
        uses = self.ties.between(i.stage, i.other)
        if i.micro < 0:
            parts = [self.stages[i.stage].weights.extra[use] for use in uses]
        else:  # sent once each; kept, they would all live to the end of the step
            parts = [self.tied_out[i.stage, i.micro].pop(use) for use in uses]
        self.outbox.send([g.contiguous() for g in parts], i)

    def _send_copy(self, i: Instr) -> None:
        data = self.stages[i.stage].weights.data
        self.outbox.send([data[name] for name in self.ties.params_between(i.other, i.stage)], i)

    def _send_shard(self, i: Instr) -> None:
        """The first round of a stage's exchange. Each later one has begun by then, with the end of the one
        before."""
        if i not in self.early:
            self._begin_round(i.stage)

    def _begin_round(self, stage: int) -> None:
        """The next one: to another copy of the stage, whose message is awaited from now on."""
        i = self.rounds[stage].popleft()
        copies, other, n_micro = self.copies[stage], self.program.copy_on(i.peer), self.program.n_micro
        self.outbox.send(copies.part_for(other, n_micro), i)
        self.mailbox.expect(
            i._replace(op=Op.RECV_SHARD), copies.pieces_from(other, n_micro), partial(self._go_on, stage)
        )

    def _go_on(self, stage: int) -> None:
        """With the exchange of a stage, while this rank computes others: what has come may be sent on."""
        if self.rounds[stage]:
            self.early[self.rounds[stage][0]] = time.perf_counter()
            self._begin_round(stage)

    def _recv_shard(self, i: Instr) -> None:
        self.mailbox.finish(i)

    def _send_update(self, i: Instr) -> None:
        """Before the receive that lets the partner's come: its answer to this message would stand behind that
        one, where they share a line."""
        self.outbox.send(self.copies[i.stage].updated_for(self.program.copy_on(i.peer)), i)
        self.mailbox.post(i._replace(op=Op.RECV_UPDATE))

    def _move_on(self) -> None:
        """Messages, while this rank computes."""
        self.comm.poll()
        self.mailbox.advance()
        self.outbox.drop_sent()

    def _release(self, key: Key) -> None:
        """Gives received activations back; the messages that show their memory have left by then."""
        for t in self.held.pop(key, []):
            self.pool.give(t)

    def _return_arrived(self, stage: int) -> None:
        for leaf in [leaf for leaf in self.arrived if self.ties.owner[leaf[0]] == stage]:
            self.pool.give(self.arrived.pop(leaf))


def added(values: Iterable[float]) -> float:
    """In their order: plain additions, which `sum` is no longer."""
    return list(accumulate(values, initial=0.0))[-1]
