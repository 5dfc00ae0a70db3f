"""What a placement of a graph looks like: who holds what, and how loaded each device is."""

from __future__ import annotations

import math

from mpipipe.planner.placement import Placement, Problem, Profile, Replicated
from mpipipe.planner.placement.items import contract
from mpipipe.planner.placement.problem import topological
from mpipipe.planner.sizes import counted, size_text
from mpipipe.report.table import text_table

WIDTH = 110


def device_names(problem: Problem) -> list[str]:
    """accelerator 0 ..., cpu 0 ..."""
    kinds = (("accelerator", problem.n_accelerators), ("cpu", problem.n_cpus))
    return [f"{kind} {i}" for kind, count in kinds for i in range(count)]


def placement_text(problem: Problem, placement: Placement) -> str:
    """A row for each device that holds something, those that hold nothing, what is proved of the largest
    load, and where memory keeps nodes off the accelerators."""
    order = topological(len(problem.operators), problem.edges, range(len(problem.operators)))
    found, names = placement.loads, device_names(problem)
    rows = []
    for device, name in enumerate(names):
        held = [problem.operators[v].name for v in order if placement.device_of[v] == device]
        if held:
            rows.append(
                [
                    name, str(len(held)), held[0], held[-1], _ms(found.compute_s[device]),
                    _ms(found.communication_s[device]), _ms(found.total_s[device]),
                    size_text(int(found.memory_bytes[device])),
                ]
            )  # fmt: skip
    head = ["device", "nodes", "first", "last", "compute ms", "comm ms", "load ms", "memory"]
    most = names[found.total_s.index(found.most_s)]
    kind = "contiguous" if placement.contiguous else "several chunks allowed"
    return "\n".join(
        [
            text_table(head, rows, WIDTH, text_columns=(0, 2, 3)),
            "",
            *_unused(problem, placement),
            *_kept_off(problem, placement.contiguous),
            f"load {_ms(found.most_s)} ms on {most}, {kind}; {_proof(placement)}; {placement.seconds:.2f} s",
        ]
    )


def _unused(problem: Problem, placement: Placement) -> list[str]:
    """One line, or none."""
    idle = set(range(problem.n_devices)) - set(placement.device_of)
    kinds = (
        ("accelerator", range(problem.n_accelerators)),
        ("CPU", range(problem.n_accelerators, problem.n_devices)),
    )
    said = [
        f"{n} of {counted(len(devices), kind)}" for kind, devices in kinds if (n := len(idle & {*devices}))
    ]
    return [f"{' and '.join(said)} unused"] if said else []


def _kept_off(problem: Problem, contiguous: bool) -> list[str]:
    """How many nodes no accelerator can hold, else how many bytes all of them lack; no line where neither is
    so. Without CPUs there is no such placement."""
    items = contract(problem, contiguous)
    n, has = problem.n_accelerators, problem.capacity_bytes
    large = int((items.nbytes[items.of_operator] > has).sum())
    most, total = math.ceil(items.nbytes.max()), math.ceil(items.nbytes.sum())
    if large:
        nodes = counted(len(problem.operators), "node")
        return [
            f"no accelerator can hold {large} of the {nodes}: what has to be on one device takes up to",
            f"{size_text(most)}, each has {size_text(int(has))}; --memory {most}B would hold the largest",
        ]
    if total > n * has:
        return [
            f"the accelerators lack {size_text(math.ceil(total - n * has))} to hold all nodes, which take "
            f"{size_text(total)}"
        ]
    return []


def replicated_text(profile: Profile, plan: Replicated) -> str:
    """A row for each stage, and what is proved of the slowest."""
    rows = [
        [
            str(i), str(stage.copies), str(len(stage.layers)), profile.layers[stage.layers[0]].name,
            profile.layers[stage.layers[-1]].name, _ms(stage.compute_s), _ms(stage.all_reduce_s),
            _ms(stage.receive_s), _ms(stage.load_s),
        ]
        for i, stage in enumerate(plan.stages)
    ]  # fmt: skip
    head = ["stage", "replicas", "nodes", "first", "last", "compute ms", "reduce ms", "receive ms", "load ms"]
    plus = "+".join(str(stage.copies) for stage in plan.stages)
    return "\n".join(
        [
            text_table(head, rows, WIDTH, text_columns=(0, 3, 4)),
            "",
            f"replicas {plus}: {_ms(plan.load_s)} ms per micro-batch; {_proof(plan)}",
        ]
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.6g}"


def _proof(plan: Placement | Replicated) -> str:
    bound = f"bound {_ms(plan.bound_s)} ms, gap"
    if plan.gap == 0:
        return f"{bound} 0.00%: proved optimal"
    small = plan.gap < 0.001
    return f"{bound} {f'{plan.gap * 100:.2g}%' if small else f'{plan.gap:.2%}'}, not proved optimal"
