"""`python -m mpipipe plan config.yaml [key=value ...] --ranks N`: plan before you pay.

The model is captured without its weights, its groups are counted or timed here, and the planner cuts it for
ranks that nobody has started. No MPI.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.text import Text

from mpipipe.cluster.launch import advice_here
from mpipipe.cluster.memory import uncollected
from mpipipe.cluster.spares import check_spares
from mpipipe.cluster.started import as_root
from mpipipe.commands import allocation, run
from mpipipe.commands.arguments import positive, seconds
from mpipipe.commands.cores import advice, shares, table
from mpipipe.commands.costing import Costing
from mpipipe.commands.inputs import model_of
from mpipipe.commands.levels import check_curve_output, levels, show
from mpipipe.commands.machines import Here, Machine, There
from mpipipe.commands.output import check_folder, write_output, writing
from mpipipe.commands.refine import refine_run
from mpipipe.config import Config, load
from mpipipe.config.cluster import load_cluster
from mpipipe.errors import PlanError
from mpipipe.graph.variants import Variants
from mpipipe.planner.alternatives import alternatives
from mpipipe.planner.curve import resource_curve
from mpipipe.planner.mirrors import with_mirrors
from mpipipe.planner.noise import noise
from mpipipe.planner.prediction import predict
from mpipipe.planner.sizes import counted
from mpipipe.planner.whole import any_order
from mpipipe.report.plan import (
    against,
    beside_any_order,
    blocks_text,
    chosen,
    outlook,
    stage_rows,
    steadiness,
)
from mpipipe.report.plan_file import plan_text
from mpipipe.runtime.costing import Found
from mpipipe.state.rundir import CONFIG
from mpipipe.values import Cluster, Plan

FROM_ALLOCATION = "--from-allocation"


def main(argv: Sequence[str]) -> int:
    if FROM_ALLOCATION in argv:
        return allocation.main([word for word in argv if word != FROM_ALLOCATION])
    parser = _parser()
    a = parser.parse_intermixed_args(list(argv))
    if a.refine and (a.config or a.levels or a.cluster or a.cores):
        parser.error("--refine has config, ranks and cluster from the run; leave them out")
    if not a.refine and not (a.config and (a.levels or a.cores)):
        parser.error("the following arguments are required: config, --ranks or --cores; or --refine RUN")
    if a.cores and (a.levels or a.cluster or a.output):
        parser.error("--cores weighs all ranks of this node; leave out --ranks, --cluster and -o")
    if a.budget < math.inf and (a.refine or a.cores or len(a.levels) > 1):
        parser.error("--budget is for one number of --ranks; leave it out")
    with uncollected():  # a large model's graph is a million objects: to look through them takes seconds
        work = _refine if a.refine else _cores if a.cores else _plan
        return run(lambda: work(a))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpipipe plan",
        description="cut, time and memory on any number of ranks; without mpirun",
    )
    parser.add_argument("config", nargs="?", help="the YAML file of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="any key of the config")
    parser.add_argument(
        "--ranks",
        dest="levels",
        metavar="N",
        type=levels,
        help="how many there would be; 1..64 or 1,2,4,12: what more would bring",
    )
    parser.add_argument(
        "--cores", metavar="N", type=positive, help="of this node: weighs ranks x threads for so many"
    )
    parser.add_argument(
        FROM_ALLOCATION,
        action="store_true",
        help="inside a Slurm job: ranks, threads and binding for its nodes",
    )
    parser.add_argument("--cluster", metavar="FILE", help="another machine; without it, ranks like this one")
    parser.add_argument(
        "--budget", type=seconds, default=math.inf, metavar="TIME", help="such as 10s: the best plan so far"
    )
    parser.add_argument(
        "--refine", metavar="RUN", help="instead of a config: plan a run anew from what its stages took"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write the plan there, for `train --plan`; of several --ranks, curve.json or curve.png",
    )
    return parser


def _plan(a: argparse.Namespace) -> None:
    _check_output(a.output, curve=len(a.levels) > 1)
    config = load(a.config, a.overrides)
    machine = There(config, load_cluster(a.cluster)) if a.cluster else Here(config, a.levels[0])
    check_spares(config.run.spares, a.levels[0], config.run.recover)
    a.levels = tuple(n - config.run.spares for n in a.levels)
    a.ranks = a.levels[0]  # costs are taken once, for the smallest level
    if len(a.levels) > 1:
        _curve(a, config, machine)
        return
    variants_of, data = model_of(config)
    with _working(a.config, a.ranks):
        costing = Costing(config, machine, a.ranks, variants_of)
        joint = costing.search(a.budget)
        plan, costs = joint.plan, joint.costs
        variants, found = costing.at[plan.numerics.micro_batch]
        graph, cluster = variants.graph, costs.cluster
        said = source_text(found, machine, costing.seconds)

        mirrors = []
        if config.run.recover == "mpi":
            plan, said_of_them = with_mirrors(plan, costs, config.run.mirror_every)
            mirrors = [said_of_them]
        finest = plan.numerics.micro_batch == 1
        timeline = predict(costs, plan.layout, joint.program, plan.prediction.lower_bound_s, finest)[1]
        rows = stage_rows(plan, costs, timeline, variants.parameters_by_stage(plan.layout.cuts))
        sizes = sorted(costing.at) if len(costing.counts) > 1 else ()
        others = alternatives(
            plan, costs, lambda ranks: machine.cluster(ranks, costing.base_bytes), joint.tried,
            config.pipeline.recompute,
        )  # fmt: skip

    per_sample = data.tokens_per_sample
    print(_heading(a, config, variants, counted(a.ranks, "rank")))
    print(said, *machine.assumed(cluster), *costing.choices, "", sep="\n")
    print(outlook(plan, rows, config.train.batch * per_sample, "tokens" if per_sample > 1 else "samples"))
    if len(joint.tried) > 1:
        print(chosen(joint, sizes, costing.seconds))
    blocks = [text] if (text := blocks_text(costing.blocks_why, plan, costs)) else []
    order = beside_any_order(any_order(graph, plan, costs))
    print(*blocks, *order, *mirrors, *steadiness(noise(plan, costs)), "", against(others), sep="\n")
    if a.output:
        with writing(a.output):
            write_output(Path(a.output), plan_text(plan))
        train = shlex.join([a.config, *a.overrides, "--plan", a.output])
        ranks = a.ranks + config.run.spares
        launcher = shlex.join(["mpirun", *as_root(), "-n", str(ranks)])
        print(f"\nplan: {a.output}; to train it: {launcher} python -m mpipipe.train {train}")


def _curve(a: argparse.Namespace, config: Config, machine: Machine) -> None:
    """Of several numbers of ranks, with costs that are taken once."""
    p = config.pipeline
    if p.micro_batches == "auto":
        raise PlanError(
            f"--ranks {a.levels[0]} to {a.levels[-1]}: pipeline.micro_batches is auto, which is searched for "
            "one number of ranks; set it, or plan for one"
        )
    variants_of, data = model_of(config)
    with _working(a.config, a.ranks) as status:
        costing = Costing(config, machine, a.ranks, variants_of)
        costing.usual()

        def cluster_of(ranks: int) -> Cluster:
            status.update(_doing(a.config, ranks))
            return machine.cluster(ranks, costing.base_bytes)

        curve = resource_curve(
            costing.prediction_on, config.train.batch, a.levels, cluster_of, data.train_samples
        )
    variants, found = costing.at[costing.asked.sizes[0]]
    cluster = machine.cluster(curve.levels[-1].ranks, costing.base_bytes)
    print(_heading(a, config, variants, f"{a.levels[0]} to {a.levels[-1]} ranks"))
    print(source_text(found, machine, costing.seconds), *machine.assumed(cluster), sep="\n")
    print(*costing.choices, "", sep="\n")
    show(curve, a.config, a.output)


def _working(config: str, ranks: int) -> Status:
    """Says on a terminal that something is done."""
    return Console(stderr=True).status(_doing(config, ranks), refresh_per_second=4)  # drawing is timed, too


def _doing(config: str, ranks: int) -> Text:
    return Text(f"planning {config} for {counted(ranks, 'rank')}")


def _cores(a: argparse.Namespace) -> None:
    config = load(a.config, a.overrides)
    busy = advice_here()
    found = shares(config, a.cores, model_of(config)[0])
    print(f"{a.config} on {counted(a.cores, 'core')} of this node: {config.model.name}\n")
    print(table(found, config.train.batch), "", advice(found, a.config, a.overrides), sep="\n")
    if busy:
        print(f"note: {busy}")
    print("threads decide the bits of a run: choose before its first step; a resumed run keeps its own")


def _refine(a: argparse.Namespace) -> None:
    _check_output(a.output)
    plan, said = refine_run(Path(a.refine))
    print(said)
    if a.output:
        with writing(a.output):
            write_output(Path(a.output), plan_text(plan))
        print(f"\nplan: {a.output}; to train it:\n  {_train(Path(a.refine), plan, a.output)}")


def _train(folder: Path, plan: Plan, file: str) -> str:
    """The command; overrides of the run are in its config.yaml."""
    ranks, old = plan.layout.n_ranks + load(folder / CONFIG).run.spares, folder.resolve()
    words = [str(folder / CONFIG), f"run.dir={folder.parent / old.name}-refined", "--plan", file]
    return f"mpirun -n {ranks} python -m mpipipe.train {shlex.join(words)}"


def _check_output(output: str | None, curve: bool = False) -> None:
    """What is there and is no file, such as /dev/stdout, may have any name."""
    if not output:
        return
    path = Path(output)
    if curve:
        check_curve_output(output)
    elif path.suffix != ".json" and not (path.exists() and not path.is_file()):
        raise PlanError(
            f"-o {output}: a plan is written as .json; name such a file, and draw it with python -m mpipipe "
            f"draw {path.stem}.json -o {path.stem}.png"
        )
    check_folder(output)


def _heading(a: argparse.Namespace, config: Config, variants: Variants, ranks: str) -> str:
    graph = variants.graph
    total = sum(math.prod(s.shape) for s in graph.params.values())
    spares = f", and {counted(config.run.spares, 'spare')} more" if config.run.spares else ""
    model = f"{config.model.name}, {total:,} parameters, {len(graph.groups)} groups"
    return f"{a.config} on {ranks}{spares}: {model}"


def source_text(found: Found, machine: Machine, seconds: float) -> str:
    """Where the costs are from, and how far they may be off."""
    lines = [f"costs: {len(found.samples)} distinct groups in {seconds:.1f} s"]
    if found.timed:
        why = "" if machine.timed else " (not counted: they run as written), with the seconds of this machine"
        lines.append(f"{len(found.timed)} timed here{why}, spread {found.spread:.0%}")
    if found.modelled:
        lines.append(f"{found.modelled} modelled: {machine.how}")
    if found.compared:
        low, high = min(found.compared), max(found.compared)
        middle = statistics.median(found.compared)
        lines.append(f"modelled / timed, where both are known: {middle:.2f} ({low:.2f} to {high:.2f})")
    return "\n       ".join(lines)
