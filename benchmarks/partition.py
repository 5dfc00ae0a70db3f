"""Placing whole graphs: how good, how sure, how long. One JSON line for each graph and kind.

    python -m benchmarks.partition [FOLDER] [--families bert,residual,...] [--budget 10]

FOLDER: with graphs in the JSON of msr-fiddle/dnn-partitioning, on the devices that they name. The families
are drawn, for inference and for training, on 2, 4, 6 and 8 accelerators. `load_ms` is that of the most loaded
device, `bound_ms` what no placement of the kind undercuts, `gap` between the two; `over_one_device` and
`over_linear_order` are the load over that of all on one accelerator, and over that of the best contiguous
segments of several topological orders. `seconds` is wall time, `cpu_s` that of the process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from mpipipe.commands.graphs import parse_json
from mpipipe.planner.placement import Operator, Problem, loads, place
from mpipipe.planner.placement.items import contract
from mpipipe.planner.placement.linear import place_linearly

GRAPHS = ROOT / "tests" / "planner" / "placement" / "graphs.py"
DEVICES = (2, 4, 6, 8)
CAPACITY_BYTES = 16 * 2**30


def families() -> dict[str, Callable[[], Any]]:
    """Graphs of about 40 to 3,500 nodes, as the tests draw them."""
    spec = importlib.util.spec_from_file_location("graphs", GRAPHS)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["graphs"] = drawn = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawn)
    return {
        "bert": lambda: drawn.bert_operators(12, casts=True),
        "residual": lambda: drawn.residual_network(16),
        "inception": lambda: drawn.inception(11, 4, 5),
        "wide_inception": lambda: drawn.inception(80, 5, 9),
        "recurrent": lambda: drawn.recurrent(8),
        "grid": lambda: drawn.grid(8, 5),
        "chains": lambda: drawn.parallel_chains(3, 100, rungs=5),
    }


def problem_of(graph: Any, n_accelerators: int) -> Problem:
    """A drawn graph, whose numbers are milliseconds, with one CPU."""
    fields = (graph.accelerator_s, graph.cpu_s, graph.nbytes, graph.tensor_cost, graph.colour, graph.backward)
    operators = tuple(
        Operator(v, f"node{v}", run * 1e-3, cpu * 1e-3, nbytes, output * 1e-3, colour, backward)
        for v, (run, cpu, nbytes, output, colour, backward) in enumerate(zip(*fields, strict=True))
    )
    return Problem(operators, tuple(graph.edges), n_accelerators, 1, CAPACITY_BYTES)


def problems(folder: Path | None, chosen: Sequence[str]) -> Iterator[tuple[str, Problem]]:
    for path in sorted(folder.glob("*.json")) if folder else ():
        yield path.stem, parse_json(path.read_text(), path.name)
    for family in chosen:
        for training in (False, True):
            graph = families()[family]()
            graph = graph.with_backward() if training else graph
            name = f"{family}_{'training' if training else 'inference'}"
            yield from ((name, problem_of(graph, devices)) for devices in DEVICES)


def placed(name: str, problem: Problem, contiguous: bool, budget_s: float) -> dict[str, Any]:
    cpu_s = time.process_time()
    found = place(problem, name, contiguous=contiguous, budget_s=budget_s)
    cpu_s = time.process_time() - cpu_s
    items = contract(problem, contiguous)
    return {
        "graph": name, "nodes": len(problem.operators), "items": len(items),
        "accelerators": problem.n_accelerators, "kind": "contiguous" if contiguous else "chunks",
        "load_ms": found.load_s * 1e3, "bound_ms": found.bound_s * 1e3, "gap": found.gap,
        "over_one_device": found.load_s / sum(o.accelerator_s for o in problem.operators),
        "over_linear_order": found.load_s / _linear_s(problem), "seconds": found.seconds, "cpu_s": cpu_s,
    }  # fmt: skip


def _linear_s(problem: Problem) -> float:
    items = contract(problem, contiguous=True)
    found = place_linearly(items, problem.n_accelerators, problem.n_cpus, problem.capacity_bytes)
    return min(
        (loads(problem, device[items.of_operator].tolist()).most_s for device in found), default=math.inf
    )


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description="how good placements of whole graphs are, and how long they take"
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, help="with graphs as JSON; without it the families alone"
    )
    parser.add_argument("--families", default=",".join(families()), help="empty: none; default: all")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for each; default: 10")
    a = parser.parse_args(argv)
    for name, problem in problems(a.folder, [family for family in a.families.split(",") if family]):
        for contiguous in (True, False):
            print(json.dumps(placed(name, problem, contiguous, a.budget)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
