"""One rank of a peer, from its environment (RANK, WORLD_SIZE and so on, as torchrun sets them)."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from benchmarks.peers import ALONE
from benchmarks.peers.ddp import Ddp
from benchmarks.peers.one_process import OneProcess
from benchmarks.peers.pipelining import Pipelining
from benchmarks.peers.task import Peer, Task
from benchmarks.turns import wait_for_turn
from mpipipe.cluster.memory import PeakMemory
from mpipipe.config import load
from mpipipe.runtime.setting import set_gemm_route, set_threads


def make(side: str, task: Task, choice: str) -> tuple[Peer, dict[str, Any]]:
    """The peer, and the setting that it runs with. Choice: of a pipeline its split, of the others whether the
    micro-batches are ours or as large as can be."""
    config = task.config
    whole = config.train.batch // (1 if side in ALONE else dist.get_world_size())
    rows = whole if choice == "whole" else min(config.micro_batch, whole)
    if side in ALONE:
        return OneProcess(task, rows, side == "compile"), {"micro_batch": rows}
    if side == "ddp":
        return Ddp(task, rows), {"micro_batch": rows}
    split = tuple(map(int, choice.split(",")))
    return Pipelining(task, side, split), {"split": split}


def work(a: argparse.Namespace) -> NoReturn:
    """Rank 0 prints the result as its last line."""
    config = load(a.config, a.overrides)
    dist.init_process_group("gloo")
    if a.side == "compile":
        import torch._inductor.compile_fx  # noqa: F401 - counted as an import, as all others are

    memory, world = PeakMemory(), dist.get_world_size()
    set_threads(a.ranks // world)
    set_gemm_route(config.kernels.gemm)
    peer, setting = make(a.side, Task(config, Path(a.folder), a.update), a.choice)
    seconds, losses = [], []
    dist.barrier()
    for step in range(config.train.steps):
        wait_for_turn()
        start = time.perf_counter()
        losses.append(peer.step(step))
        seconds.append(time.perf_counter() - start)
        if step == 0:
            memory.restart()  # a compiler has done its work; all else stays, and each step needs it again
    peaks = [0] * world
    dist.all_gather_object(peaks, memory.nbytes)
    dist.barrier()
    if dist.get_rank() == 0:
        step_s = statistics.median(seconds[1:] or seconds)
        figures = {"step_s": step_s, "peak_bytes": peaks, **setting, "update": a.update}
        print(json.dumps(figures | {"losses": losses, "steps_s": seconds}), flush=True)
    # at an ordinary end gloo's thread and what is left of DDP can wait for each other, and for Python's lock
    os._exit(0)
