"""One plan at the scale of a supercomputer, from costs that are made up: one JSON line.

    python -m benchmarks.scale GROUPS RANKS MICRO_BATCHES

Identical layers of 100 groups, or of 10 where there are fewer than 50 groups a rank, on ranks that are alike,
eight to a node. CPU seconds of `make_plan`, and of its parts once more by themselves; the most memory of the
process, costs included. `python -m benchmarks.planning --scale` runs several of these and prints a table.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mpipipe.planner import make_plan, partition, predict, program_for
from mpipipe.planner.bounds import step_bound_s
from mpipipe.values import Cluster, Costs, Device, GroupCost, Link, Numerics

T = TypeVar("T")
CASES = (
    (1_000, 64, 128), (10_000, 128, 256), (10_000, 512, 64), (10_000, 1024, 64), (10_000, 1024, 512),
    (10_000, 4096, 64), (100_000, 64, 128), (100_000, 1024, 64), (100_000, 1024, 512), (10_000, 1024, 4096),
)  # fmt: skip
RANKS_PER_NODE = 8
COLUMNS = {
    "groups": "groups", "nodes": "nodes", "ranks": "ranks", "micro_batches": "micro-batches",
    "instructions": "instructions", "plan_cpu_s": "plan, CPU s", "partition_cpu_s": "partition",
    "bound_cpu_s": "bound", "program_cpu_s": "program, proof", "predict_cpu_s": "simulation",
    "peak_mib": "peak, MiB", "gap": "gap",
}  # fmt: skip


def made_up(n_groups: int, n_ranks: int) -> Costs:
    rng, layer = random.Random(0), 100 if n_groups >= 50 * n_ranks else 10
    kinds = []
    for _ in range(layer):
        seconds, sent = rng.lognormvariate(-7.0, 1.0), rng.randint(1, 16) << 18
        kinds.append({"fwd_s": seconds, "bwd_input_s": seconds, "bwd_weight_s": seconds,
                      "param_bytes": rng.randint(1, 64) << 14, "stash_bytes": rng.randint(1, 64) << 14,
                      "workspace_bytes": rng.randint(0, 8) << 20,
                      "act_bytes": sent, "grad_bytes": sent})  # fmt: skip
    groups = tuple(GroupCost(f"layers.{i // layer}/{i % layer}", **kinds[i % layer]) for i in range(n_groups))
    devices = (Device("made up", speed=1.0, memory_bytes=256 << 30, threads=12),) * n_ranks
    nodes = tuple(rank // RANKS_PER_NODE for rank in range(n_ranks))
    links = {"node": Link(2e-6, 9e9), "switch": Link(3e-6, 11e9)}
    return Costs(groups, Cluster(devices, nodes, links), (), 4.0, 1e-10, "modelled", 0.0)


def numerics_of(n_micro: int) -> Numerics:
    return Numerics(batch=n_micro, micro_batch=1, micro_batches=n_micro, blocks=1, threads=12, bits="torch",
                    gemm="mkl", precision="fp32", tied="per_use", op_table={}, torch="", instruction_set="",
                    seed=0)  # fmt: skip


def measured(n_groups: int, n_ranks: int, n_micro: int) -> dict[str, Any]:
    costs, numerics = made_up(n_groups, n_ranks), numerics_of(n_micro)
    names = costs.names
    plan_s, (plan, program) = _timed(lambda: make_plan(costs, numerics, "1f1b", 4, n_ranks))
    layout, bound_s = plan.layout, plan.prediction.lower_bound_s
    found = {
        "groups": n_groups, "nodes": -(-n_ranks // RANKS_PER_NODE), "ranks": n_ranks,
        "micro_batches": n_micro, "instructions": sum(map(len, program.codes)),
        "plan_cpu_s": plan_s, "gap": plan.prediction.gap,
    }  # fmt: skip
    del program
    parts: dict[str, Callable[[], object]] = {
        "partition_cpu_s": lambda: partition(costs, n_micro, "1f1b", n_ranks, 4),
        "bound_cpu_s": lambda: step_bound_s(costs, n_micro, n_ranks),
    }
    found |= {name: _timed(part)[0] for name, part in parts.items()}
    found["program_cpu_s"], made = _timed(lambda: program_for(layout, numerics, (), names))
    found["predict_cpu_s"], _ = _timed(lambda: predict(costs, layout, made, bound_s))
    return found | {"peak_mib": _peak_mib()}


def _peak_mib() -> float:
    """Of this program: that of getrusage begins with what its parent had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + " ---: |" * len(COLUMNS)]
    lines += ["| " + " | ".join(_text(name, row[name]) for name in COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def _text(name: str, value: float) -> str:
    if name == "gap":
        return f"{value:.1%}"
    return f"{value:.2f}" if name.endswith("_s") else f"{value:,.0f}"


def _timed(do: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds, and what it gives."""
    start = time.process_time()
    result = do()
    return time.process_time() - start, result


if __name__ == "__main__":
    print(json.dumps(measured(*map(int, sys.argv[1:]))))
