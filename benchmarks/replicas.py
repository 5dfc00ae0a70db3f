"""What replicas exchange in a step, beside MPI's own collectives for as many bytes.

    python -m benchmarks.replicas [--ranks 2] [--mib 64] [--steps 12]
    MPIPIPE_TESTBED=<folder of hosts-up> python -m benchmarks.replicas --rate 1gbit    # between two hosts

R replicas of a network of linear layers train for some steps. After each step the same ranks sum a buffer as
large as the gradients by MPI_Allreduce, and by MPI_Reduce_scatter_block and MPI_Allgather, which are its two
halves and leave room for the update between them, as the exchange of the replicas does.

exchange_s: from the last backward of all ranks to the first norm, and from the last update to the end of the
step. Medians over steps without the first; ratio: the faster way of MPI / exchange_s, above 1 the replicas'
own exchange is faster, which is the bar. As in a run, freed memory is kept, and messages move on as this
transport does best. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from torch import nn

from benchmarks.bars import at_least
from benchmarks.common import launch, machine
from benchmarks.hosts import Hosts, testbed_of
from mpipipe.cluster import overlap
from mpipipe.cluster.mpi import MpiCommunicator, connect
from mpipipe.data.synthetic import SyntheticVectors
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.models import cross_entropy
from mpipipe.planner.exchange import exchange_of
from mpipipe.runtime.optimizer import OptimizerSettings
from mpipipe.runtime.process import resident_memory
from mpipipe.runtime.setting import numerics_of, set_threads
from mpipipe.runtime.trainer import Trainer
from mpipipe.values import Float64, Layout, Op, Plan, Prediction

WIDTH, ROWS = 1024, 2  # of a layer, which has 4 MiB of weights; samples of a micro-batch
BAR = 1.0  # of the ratio


def trainer_of(comm: MpiCommunicator, mib: int, steps: int) -> Trainer:
    """A replica of all layers on each rank."""
    set_threads(1)
    data = SyntheticVectors(WIDTH, WIDTH, 2 * ROWS * comm.size, 0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(mib * 2**20 // (4 * WIDTH**2))]
    source = ModelSource(lambda: nn.Sequential(*layers), 0)
    variants = Variants(source, cross_entropy, data.specs, ROWS, "fp32")
    numerics = numerics_of(
        batch=ROWS * comm.size, micro_batches=comm.size, blocks=1, reduce="fast", threads=1, gemm="mkl",
        precision="fp32", tied="per_use", seed=0,
    )  # fmt: skip
    ranks = tuple(range(comm.size))
    by_node = exchange_of(comm.node_of_rank).by_node
    layout = Layout((), (ranks,), "1f1b", 4, nodes=comm.node_of_rank if by_node else ())
    plan = Plan(numerics, layout, Prediction(0.0, 0.0, 0.0, (), 0.0, 0.0))
    return Trainer(comm, variants, plan, OptimizerSettings(steps=steps), data)


def exchange_s(times: Sequence[Float64], codes: Sequence[np.ndarray]) -> float:
    """Of one step, by rank."""

    def last_end(*ops: Op) -> float:
        return max(float(t[np.isin(c[:, 0], ops), 1].max()) for t, c in zip(times, codes, strict=True))

    norm = max(float(t[c[:, 0] == Op.NORM, 0].max()) for t, c in zip(times, codes, strict=True))
    return norm - last_end(Op.B, Op.W) + last_end(Op.RECV_UPDATE) - last_end(Op.STEP)


def rank_main(mib: int, steps: int) -> None:
    """One rank; rank 0 prints the line."""
    resident_memory()
    comm = connect()
    overlap.choose(comm, {})
    mpi = MPI.COMM_WORLD.Dup()
    trainer = trainer_of(comm, mib, steps)
    summed = np.zeros(mib * 2**20 // 4, np.float32)
    part = np.zeros(len(summed) // comm.size, np.float32)
    whole = summed[: len(part) * comm.size]

    def in_halves() -> None:
        mpi.Reduce_scatter_block(whole, part)
        mpi.Allgather(part, whole)

    ways: dict[str, Callable[[], object]] = {
        "allreduce_s": lambda: mpi.Allreduce(MPI.IN_PLACE, summed), "halves_s": in_halves,
    }  # fmt: skip
    seconds: dict[str, list[float]] = {"exchange_s": [], **{name: [] for name in ways}}
    for step in range(steps):
        outcome = trainer.step(step)
        times = comm.allgather_object(outcome.times - comm.clock_offset_s)
        seconds["exchange_s"].append(exchange_s(times, trainer.program.codes))
        for name, way in ways.items():
            comm.barrier()
            start = time.perf_counter()
            way()
            seconds[name].append(max(comm.allgather_object(time.perf_counter() - start)))
    found: dict[str, Any] = {name: float(np.median(row[1:])) for name, row in seconds.items()}
    found["ratio"] = min(found[name] for name in ways) / found["exchange_s"]
    found |= at_least(found["ratio"], BAR)
    if comm.rank == 0:
        job = {"replicas": comm.size, "nodes": comm.node_of_rank, "mib": mib}
        print(json.dumps(job | found | {"machine": machine()}), flush=True)
    mpi.Free()
    comm.close()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="the replicas' exchange beside MPI's collectives")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=64, help="of weights")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rate", help="of a network between two hosts of the test bed, such as 1gbit")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # this process is one
    a = parser.parse_args(argv)
    if a.rank:
        rank_main(a.mib, a.steps)
        return
    job = (a.ranks, "-m", "benchmarks.replicas", "--rank", f"--mib={a.mib}", f"--steps={a.steps}")
    if a.rate is None:
        print(launch(*job).splitlines()[-1])
        return
    with tempfile.TemporaryDirectory() as folder, Hosts(testbed_of(parser), Path(folder)) as hosts:
        hosts.shape(a.rate)
        print(hosts.launch(*job).splitlines()[-1])


if __name__ == "__main__":
    main(sys.argv[1:])
