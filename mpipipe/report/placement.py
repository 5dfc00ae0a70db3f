"""What a placement of a graph looks like: who holds what, and how loaded each device is."""

from __future__ import annotations

from mpipipe.planner.placement import Placement, Problem, Profile, Replicated
from mpipipe.planner.placement.items import topological
from mpipipe.planner.sizes import size_text
from mpipipe.report.table import text_table

WIDTH = 110


def device_names(problem: Problem) -> list[str]:
    """accelerator 0 ..., cpu 0 ..."""
    kinds = (("accelerator", problem.n_accelerators), ("cpu", problem.n_cpus))
    return [f"{kind} {i}" for kind, count in kinds for i in range(count)]


def placement_text(problem: Problem, placement: Placement) -> str:
    """A row for each device that holds something, and what is proved of the largest load."""
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
            f"load {_ms(found.most_s)} ms on {most}, {kind}; {_proof(placement)}; {placement.seconds:.2f} s",
        ]
    )


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
    head = ["stage", "replicas", "nodes", "first", "last", "compute ms", "all-reduce", "receive", "load ms"]
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
    bound = f"bound {_ms(plan.bound_s)} ms, gap {plan.gap:.2%}"
    return f"{bound}: proved optimal" if plan.gap == 0 else bound
