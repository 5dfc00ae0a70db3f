"""A run folder without a run: planned on made-up costs, "measured" by a simulation of other ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

from mpipipe.config import parse, to_yaml
from mpipipe.planner import make_plan, predict, simulate, stage_costs
from mpipipe.report.account import account
from mpipipe.report.plan_file import plan_text
from mpipipe.report.trace import Trace, write_trace
from mpipipe.values import (
    Cluster,
    Costs,
    Device,
    GroupCost,
    Link,
    Numerics,
    Plan,
    RankReport,
    Report,
    Timeline,
    to_json,
)  # fmt: skip

MIB = 1 << 20


def made_costs(n_ranks: int = 2, n_groups: int = 8) -> Costs:
    """Groups of unequal work on ranks of two nodes."""
    groups = tuple(
        GroupCost(
            f"blocks.{i}", fwd_s=0.004 + 0.0005 * (i % 3), bwd_input_s=0.005, bwd_weight_s=0.004,
            param_bytes=2 * MIB, stash_bytes=4 * MIB, workspace_bytes=MIB, act_bytes=MIB, grad_bytes=MIB,
        )
        for i in range(n_groups)
    )  # fmt: skip
    device = Device("AMD EPYC 9654, AVX512", 1.0, 4 << 30, 1, 40 * MIB)
    nodes = tuple(rank * 2 // n_ranks for rank in range(n_ranks))
    links = {"node": Link(2e-6, 8e9), "switch": Link(20e-6, 1e9)}
    return Costs(groups, Cluster((device,) * n_ranks, nodes, links), (), 4.0, 1e-9, "measured", 0.03)


@cache
def made_plan(n_ranks: int = 2, n_micro: int = 4, n_groups: int = 8) -> tuple[Plan, dict[str, Timeline]]:
    """The plan with its costs, and its timelines."""
    costs = made_costs(n_ranks, n_groups)
    numerics = Numerics(
        batch=4 * n_micro, micro_batch=4, micro_batches=n_micro, blocks=1, threads=1, bits="torch",
        gemm="mkl", precision="fp32", tied="per_use", op_table={}, torch="2.13.0", instruction_set="AVX512",
        seed=0,
    )  # fmt: skip
    names = [group.name for group in costs.groups]
    plan, program = make_plan(costs, numerics, "1f1b", 4, n_ranks)
    predicted = predict(costs, plan.layout, program)[1]
    cuts = tuple(names.index(name) for name in plan.layout.cuts)
    slower = [
        replace(stage, fwd_s=stage.fwd_s * (1.1 + 0.1 * (s % 2)), act_bytes=4 * stage.act_bytes)
        for s, stage in enumerate(stage_costs(costs, cuts))
    ]
    measured = simulate(program, slower, costs.cluster, norm_s=1e-3)
    measured = replace(measured, memory_bytes=tuple(held * 9 // 8 for held in predicted.memory_bytes))
    return replace(plan, costs=costs), {"predicted": predicted, "measured": measured}


def made_report(plan: Plan, timelines: dict[str, Timeline], steps: int) -> Report:
    predicted, measured = timelines["predicted"], timelines["measured"]
    n, step_s = len(measured.times), measured.makespan_s
    spans = step_s, predicted.makespan_s
    ranks = tuple(
        RankReport(
            stages=(rank,), groups=4, parameters=1_234_567, predicted_compute_s=predicted.busy_s(rank),
            compute_s=measured.busy_s(rank), predicted_bubble=1 - predicted.busy_s(rank) / spans[1],
            bubble=1 - measured.busy_s(rank) / spans[0], exposed_s=account(measured)[rank].exposed_s,
            sent_bytes=8 * MIB,
        )
        for rank in range(n)
    )  # fmt: skip
    return Report(
        val_loss=2.3018, unigram_entropy=3.236, metrics={"accuracy": 0.4321}, step_s=step_s,
        predicted_step_s=plan.prediction.step_s, peak_bytes=measured.peak_bytes,
        predicted_peak_bytes=plan.prediction.peak_bytes, bubble=measured.bubble,
        predicted_bubble=plan.prediction.bubble, ranks=ranks, per_s=2048 / step_s, unit="tokens",
        weights_sha256="ab" * 32, steps=steps, final_loss=2.2041, plan_hash=plan.hash, stopped_by=None,
        exact_resume=True,
    )  # fmt: skip


def made_metrics(steps: int, step_s: float) -> list[dict[str, float]]:
    lines = []
    for step in range(1, steps + 1):
        loss = 2.0 + 3.5 * math.exp(-step / 30) + 0.05 * math.sin(7.3 * step)
        line = {"step": step, "loss": loss, "lr": 1e-3 * min(1, step / 20), "grad_norm": 1 + 1 / step}
        line |= {"step_s": step_s * (1 + 0.02 * math.sin(step)), "tokens_per_s": 2048 / step_s}
        if step % 20 == 0:
            line |= {"val_loss": loss + 0.1, "val_accuracy": 0.4 * step / steps}
        lines.append(line)
    return lines


def made_run(
    folder: Path, n_ranks: int = 2, n_micro: int = 4, steps: int = 60, name: str = "made", ended: bool = True
) -> Path:
    """`ended=False`: as while the run goes on."""
    folder.mkdir(parents=True)
    plan, timelines = made_plan(n_ranks, n_micro, max(8, n_ranks))
    (folder / "config.yaml").write_text(to_yaml(parse("", overrides=[f"run.name={json.dumps(name)}"])))
    (folder / "plan.json").write_text(plan_text(plan))
    lines = made_metrics(steps, timelines["measured"].makespan_s)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if ended:
        (folder / "summary.json").write_text(to_json(made_report(plan, timelines, steps)))
        resident = tuple(
            tuple(int(peak * (0.9 + 0.1 * min(1, step / 8))) for step in range(50))
            for peak in timelines["measured"].peak_bytes
        )
        write_trace(folder / "timeline.json", Trace(timelines, resident, tuple(range(steps - 49, steps + 1))))
    return folder
