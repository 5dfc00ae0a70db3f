"""The peer: torch.distributed.pipelining (Schedule1F1B) over gloo, as an expert would write it by hand.

    python -m benchmarks.peer_pipelining examples/gpt10m.yaml [key=value ...] --ranks 2 [--split 3,3]

The same model, data, micro-batches, products, optimizer and clipping as `mpipipe.train` with this
configuration; the split is by transformer blocks, each rank builds its own stage only. Prints one
JSON line. Without --split: the time of each layer is measured and the best split by them is taken.

A tied embedding is kept as Megatron-LM does (Shoeybi et al. 2019): the first and the last stage hold
a copy each, sum the gradients of both, and make the same update.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.common import ROOT, environment
from mpipipe.cluster.memory import PeakMemory
from mpipipe.config import Config, load
from mpipipe.config.sections import GptConfig
from mpipipe.data import open_dataset, prepare
from mpipipe.graph.source import ModelSource
from mpipipe.models import GPT, build, cross_entropy
from mpipipe.runtime.setting import set_gemm_route, set_threads
from mpipipe.train import optimizer_settings

Split = tuple[int, ...]  # transformer blocks of each stage
TIED = "head.weight", "wte.weight"  # one parameter, on the last stage and on the first


# -- the model, cut by hand ------------------------------------------------------------------------


class HandStage(nn.Module):
    """Embeddings if first, some blocks, head if last. Names are those of the whole model."""

    def __init__(self, whole: GPT, split: Split, rank: int) -> None:
        super().__init__()
        start = sum(split[:rank])
        self.first, self.last = rank == 0, rank == len(split) - 1
        if self.first:
            self.wte, self.wpe = whole.wte, whole.wpe
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for i in range(start, start + split[rank])})
        if self.last:
            self.ln_f, self.head = whole.ln_f, whole.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:  # tokens (B, T)
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.ln_f(x)) if self.last else x


def build_stage(factory: Callable[[], nn.Module], split: Split, rank: int) -> HandStage:
    """Only this stage gets memory; a parameter's first values depend on its name alone."""
    with torch.device("meta"):
        whole = factory()
    assert isinstance(whole, GPT)
    stage = HandStage(whole, split, rank)
    stage.to_empty(device="cpu")
    residual = 0.02 / math.sqrt(2 * sum(split))
    with torch.no_grad():
        for name, p in stage.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(dict([TIED]).get(name, name).encode()))
            if p.dim() >= 2:
                p.normal_(0.0, residual if name.endswith("proj.weight") else 0.02, generator=generator)
            else:
                p.fill_(1.0 if name.endswith("weight") else 0.0)
    return stage


def take_our_weights(stage: HandStage, source: ModelSource) -> None:
    """To compare losses: the bits with which mpipipe starts."""
    with torch.no_grad():
        for name, p in stage.named_parameters():
            own = source.alias[name]
            p.copy_(source.materialise([own])[own])


# -- one rank --------------------------------------------------------------------------------------


class Peer:
    """One rank of the hand-written trainer."""

    def __init__(self, config: Config, split: Split, rank: int, same_weights: bool) -> None:
        assert isinstance(config.model, GptConfig)
        assert config.train.batch % config.pipeline.micro_batches == 0, "tensor_split would pad nothing"
        self.config, self.settings, self.rank = config, optimizer_settings(config), rank
        self.dataset = open_dataset(config, os.environ["BENCH_DATA"])
        factory = build(config, self.dataset).model
        self.stage = build_stage(factory, split, rank)
        if same_weights:
            take_our_weights(self.stage, ModelSource(factory, config.train.seed))
        self.tied = self._tied_group(len(split)) if config.model.tied else None
        self.optimizer = self._optimizer()
        self.schedule = self._schedule(len(split))
        self.total = 1.0

    def _tied_group(self, n: int) -> tuple[dist.ProcessGroup, nn.Parameter] | None:
        group = dist.new_group([0, n - 1])
        if self.rank not in (0, n - 1):
            return None
        layer = self.stage.wte if self.rank == 0 else self.stage.head
        assert isinstance(layer.weight, nn.Parameter)
        return group, layer.weight

    def _optimizer(self) -> torch.optim.Optimizer:
        s = self.settings
        decay = [p for p in self.stage.parameters() if p.dim() >= 2]
        plain = [p for p in self.stage.parameters() if p.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": decay, "weight_decay": s.weight_decay}, {"params": plain, "weight_decay": 0.0}
        ]  # fmt: skip
        groups = [g for g in groups if g["params"]]
        if s.kind == "adamw":
            return torch.optim.AdamW(groups, lr=s.lr, betas=s.betas, eps=s.eps, foreach=False)
        return torch.optim.SGD(groups, lr=s.lr, momentum=s.momentum, foreach=False)

    def _schedule(self, n: int) -> Schedule1F1B:
        m, rows = self.config.model, self.config.micro_batch
        assert isinstance(m, GptConfig)
        vocab = m.vocab or self.dataset.vocab
        assert vocab is not None
        between = torch.empty(rows, m.context, m.d_model, device="meta", requires_grad=True)
        tokens = torch.empty(rows, m.context, dtype=torch.int64, device="meta")
        logits = torch.empty(rows, m.context, vocab, device="meta", requires_grad=True)
        arrives, leaves = tokens if self.rank == 0 else between, logits if self.rank == n - 1 else between
        stage = PipelineStage(self.stage, self.rank, n, torch.device("cpu"), arrives, leaves)

        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy(outputs, {"labels": labels})[0] / self.total

        # the loss is divided by the weight of the whole batch already
        return Schedule1F1B(stage, self.config.pipeline.micro_batches, loss_fn=loss, scale_grads=False)

    def _batch(self, step: int, key: str) -> Tensor:
        return self.dataset.batch("train", step, 0, self.config.train.batch, frozenset([key]))[key]

    def step(self, step: int) -> float:
        """One optimizer step; the mean loss."""
        losses: list[Tensor] = []
        if self.stage.last:
            labels = self._batch(step, "labels")
            self.total = float((labels != -100).sum())
            self.schedule.step(target=labels, losses=losses, return_outputs=False)
        elif self.stage.first:
            self.schedule.step(self._batch(step, "tokens"), return_outputs=False)
        else:
            self.schedule.step(return_outputs=False)
        loss = self._clip(sum(float(x.detach()) for x in losses))
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr_at(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def _clip(self, loss: float) -> float:
        """Sums up tied gradients; clips by the norm over all stages; the loss travels along."""
        skip = None
        if self.tied is not None:
            group, weight = self.tied
            assert weight.grad is not None
            dist.all_reduce(weight.grad, group=group)
            skip = weight if self.stage.last else None  # the first stage counts it
        grads = [p.grad for p in self.stage.parameters() if p.grad is not None and p is not skip]
        sums = torch.stack([get_total_norm(grads) ** 2, torch.tensor(loss)])
        dist.all_reduce(sums)
        if self.settings.clip is not None:
            clip_grads_with_norm_(self.stage.parameters(), self.settings.clip, sums[0].sqrt())
        return float(sums[1])


def worker(config: Config, split: Split, same_weights: bool) -> dict[str, Any] | None:
    """A rank of the peer, from its environment; the result on rank 0."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    memory = PeakMemory()
    set_threads(1)
    set_gemm_route(config.kernels.gemm)
    peer = Peer(config, split, rank, same_weights)
    seconds, losses = [], []
    dist.barrier()
    for step in range(config.train.steps):
        start = time.perf_counter()
        losses.append(peer.step(step))
        seconds.append(time.perf_counter() - start)
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, memory.nbytes)
    dist.destroy_process_group()
    if rank != 0:
        return None
    step_s = statistics.median(seconds[1:] or seconds)
    return {"step_s": step_s, "peak_bytes": peaks, "split": split, "losses": losses, "steps_s": seconds}


# -- the split -------------------------------------------------------------------------------------


def splits(blocks: int, ranks: int) -> Iterator[Split]:
    """Every way to put `blocks` in order on `ranks`; a stage may hold none beside embedding or head."""
    for bars in itertools.combinations(range(blocks + ranks - 1), ranks - 1):
        edges = (-1, *bars, blocks + ranks - 1)
        yield tuple(b - a - 1 for a, b in itertools.pairwise(edges))


def best_splits(layers: Sequence[float], micro_batches: int, ranks: int) -> list[Split]:
    """All splits, the shortest step first: layers = seconds of embedding, each block, head + loss.
    A step of unequal stages takes their sum and m - 1 times the slowest one."""
    *front, head = layers
    embedding, blocks = front[0], front[1:]

    def seconds(split: Split) -> float:
        ends = list(itertools.accumulate(split, initial=0))
        stages = [sum(blocks[a:b]) for a, b in itertools.pairwise(ends)]
        stages[0] += embedding
        stages[-1] += head
        return sum(stages) + (micro_batches - 1) * max(stages)

    useful = (s for s in splits(len(blocks), ranks) if all(s[1:-1]))
    return sorted(useful, key=seconds)


def layer_seconds(config: Config) -> list[float]:
    """Forward and backward of one micro-batch through each layer: medians of 5, on one thread."""
    set_threads(1)
    set_gemm_route(config.kernels.gemm)
    data = open_dataset(config, os.environ["BENCH_DATA"])
    model = build(config, data).model()
    assert isinstance(model, GPT)
    batch = data.batch("train", 0, 0, config.micro_batch, frozenset(["tokens", "labels"]))
    x = torch.randn(config.micro_batch, model.wpe.num_embeddings, model.wte.embedding_dim)

    def embed() -> Tensor:
        y: Tensor = model.wte(batch["tokens"]) + model.wpe(torch.arange(x.shape[1]))
        return y

    def head() -> Tensor:
        return cross_entropy(model.head(model.ln_f(x.requires_grad_())), batch)[0]

    block = _seconds(lambda: model.blocks[0](x.requires_grad_()))
    return [_seconds(embed), *[block] * len(model.blocks), _seconds(head)]


def _seconds(forward: Callable[[], Tensor]) -> float:
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        y = forward()
        torch.autograd.backward(y, torch.ones_like(y))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


# -- launching -------------------------------------------------------------------------------------


def spawn(arguments: Sequence[str], ranks: int, data: Path) -> str:
    """Fresh processes of this file, one per rank; what rank 0 prints last."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = environment() | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo",
        "BENCH_DATA": str(data),
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.peer_pipelining", *arguments]
    with tempfile.TemporaryFile("w+") as out:
        started = [
            subprocess.Popen(command, cwd=ROOT, env=env | {"RANK": str(r)}, stdout=out if r == 0 else None)
            for r in range(ranks)
        ]
        codes = _wait(started)
        out.seek(0)
        text = out.read()
    if any(codes):
        sys.exit(f"peer: ranks ended with codes {codes}")
    return text.strip().splitlines()[-1]


def _wait(started: list[subprocess.Popen[bytes]]) -> list[int]:
    """A rank that fails ends the others, which would wait for it forever."""
    while any(p.poll() is None for p in started):
        if any(p.poll() for p in started):
            for p in started:
                p.kill()
        time.sleep(0.05)
    return [p.wait() for p in started]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="torch.distributed.pipelining, cut by hand")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for mpipipe.train")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--split", default="", help="blocks of each stage, such as 3,3")
    parser.add_argument("--rank-splits", action="store_true", help="print the splits, best first, and end")
    parser.add_argument("--same-weights", action="store_true", help="start from mpipipe's bits")
    a = parser.parse_args(argv)
    config = load(a.config, a.overrides)
    if "RANK" in os.environ:
        result = worker(config, tuple(map(int, a.split.split(","))), a.same_weights)
        if result is not None:
            print(json.dumps(result), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(config, folder, True)
        os.environ["BENCH_DATA"] = folder
        split = a.split
        if not split:
            layers = layer_seconds(config)
            ranked = best_splits(layers, config.pipeline.micro_batches, a.ranks)
            if a.rank_splits:
                print(json.dumps({"layer_s": layers, "splits": ranked[:20]}))
                return
            split = ",".join(map(str, ranked[0]))
        same = ["--same-weights"] if a.same_weights else []
        arguments = [a.config, *a.overrides, "--split", split, *same]
        print(spawn(arguments, a.ranks, Path(folder)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
