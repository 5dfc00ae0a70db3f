"""What is found out once for all runs of the peers of a model: the data and the first weights, in a folder,
the candidates of each pipeline schedule, and the faster form of the update."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import SCHEDULES
from benchmarks.peers.chain import layers
from benchmarks.peers.pipelining import order_of, stages_of
from benchmarks.peers.splits import LayerTime, Split, ranked, splits
from benchmarks.peers.task import Task
from benchmarks.peers.weights import write_weights
from mpipipe.config import Config
from mpipipe.data import prepare as prepare_data
from mpipipe.runtime.setting import set_gemm_route, set_threads

KEPT = 20  # splits of each schedule


def prepare(config: Config, folder: Path, ranks: int) -> dict[str, Any]:
    """Parameters of the model, layer_s, splits of each schedule (the best first), update (by threads) and
    update_s; weights and data are written into the folder."""
    prepare_data(config, folder, True)
    set_gemm_route(config.kernels.gemm)
    task = Task(config, folder, "fused")
    write_weights(task.make, config.train.seed, task.weights)
    set_threads(1)
    times = layer_times(task)
    best = {name: best_splits(name, times, ranks, config.pipeline.micro_batches) for name in SCHEDULES}
    seconds = {str(n): update_seconds(config, folder, n) for n in sorted({1, ranks})}
    update = {n: min(s, key=lambda how: s[how]) for n, s in seconds.items()}
    parameters = sum(p.numel() for p in task.whole_model().parameters())
    said = {"parameters": parameters, "layer_s": times, "splits": best}
    return said | {"update": update, "update_s": seconds}


def best_splits(name: str, times: Sequence[LayerTime], ranks: int, micros: int) -> list[Split]:
    """Of a schedule; just one, whose run will say why, if torch refuses so many micro-batches or there are
    fewer layers than stages."""
    stages = sum(map(len, stages_of(name, ranks)))
    try:
        found = ranked(times, stages, order_of(name, ranks, micros))[:KEPT]
    except ValueError:
        found = []
    return found or [next(splits(len(times), stages), (1,) * stages)]


def layer_times(task: Task) -> list[LayerTime]:
    """Of one micro-batch through each layer, on this process's threads."""
    whole = task.whole_model()
    rows = task.config.micro_batch
    x, labels, times = task.inputs(0, rows)[0], task.labels(0, rows)[0], []
    chain = layers(whole)
    for i, layer in enumerate(chain):
        last = i == len(chain) - 1
        run = (lambda x, m=layer.module: task.loss(m(x), labels)) if last else layer.module
        times.append(_layer_time(run, x))
        with torch.no_grad():
            x = layer.module(x)
        x = x.requires_grad_()
    return times


def _layer_time(forward: Callable[[Tensor], Tensor], x: Tensor) -> LayerTime:
    def inputs_only(y: Tensor) -> None:
        if x.requires_grad:
            torch.autograd.grad(y, x, torch.ones_like(y))

    def whole(y: Tensor) -> None:
        if y.requires_grad:
            torch.autograd.backward(y, torch.ones_like(y))

    runs = [(_seconds(forward, x, inputs_only), _seconds(forward, x, whole)) for _ in range(4)][1:]
    of_inputs, of_all = zip(*runs, strict=True)
    forward_s = statistics.median(f for f, _ in (*of_inputs, *of_all))
    return LayerTime(
        forward_s, statistics.median(b for _, b in of_inputs), statistics.median(b for _, b in of_all)
    )


def _seconds(
    forward: Callable[[Tensor], Tensor], x: Tensor, backward: Callable[[Tensor], None]
) -> tuple[float, float]:
    start = time.perf_counter()
    y = forward(x)
    middle = time.perf_counter()
    backward(y)
    return middle - start, time.perf_counter() - middle


def update_seconds(config: Config, folder: Path, threads: int) -> dict[str, float]:
    """Of the update of the whole model, by each form."""
    set_threads(threads)
    return {how: _update_seconds(Task(config, folder, how)) for how in ("fused", "loop")}


def _update_seconds(task: Task) -> float:
    params = list(task.whole_model().parameters())
    optimizer, seconds = task.optimizer(params), []
    for step in range(4):
        for p in params:
            p.grad = torch.full_like(p, 1e-3)
        start = time.perf_counter()
        task.apply(optimizer, step)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
