"""A plan on one screen: what each rank gets, and what it should take."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from mpipipe.planner.search import cut_indices
from mpipipe.planner.stages import stage_costs
from mpipipe.values import Costs, Plan

_MIB = 1024**2


def describe(plan: Plan, costs: Costs, seconds: float, width: int = 100) -> str:
    """Text of at most `width` columns. `seconds`: what measuring and planning took."""
    names = [g.name for g in costs.groups]
    cuts = cut_indices(plan.layout, names)
    starts = [0, *cuts]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for header in ("stage", "from", "groups", "F+B ms", "send MiB", "memory MiB"):
        table.add_column(header, justify="left" if header in ("stage", "from") else "right", no_wrap=True)
    for s, cost in enumerate(stage_costs(costs, cuts)):
        end = [*cuts, len(names)][s]
        ms = (cost.fwd_s + cost.bwd_input_s + cost.bwd_weight_s) * 1e3
        send = (cost.act_bytes + cost.grad_bytes) / _MIB
        memory = plan.prediction.peak_bytes[s] / _MIB
        row = (f"{ms:.2f}", f"{send:.2f}", f"{memory:.0f}")
        table.add_row(f"{s}", names[starts[s]], f"{end - starts[s]}", *row)
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    p, n = plan.prediction, plan.numerics
    return (
        f"plan ({plan.layout.schedule}, {n.micro_batches} micro-batches of {n.micro_batch}, "
        f"costs {costs.source} in {seconds:.1f} s, spread {costs.spread:.0%}):\n{out.getvalue()}"
        f"predicted step {p.step_s * 1e3:.1f} ms, bubble {p.bubble:.1%}; no cut is faster than "
        f"{p.lower_bound_s * 1e3:.1f} ms (gap {p.gap:.1%})"
    )
