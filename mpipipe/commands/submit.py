"""`python -m mpipipe submit config.yaml [--nodes 1-16]`: how many nodes are worth it, then a batch script
with what was decided, then sbatch.

    sinfo -> plans for several numbers of nodes -> the knee -> RUN/submit.sh, made of slurm/train.sh -> sbatch
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpipipe.cluster.doctor.machine import binding
from mpipipe.cluster.launch import advice_here
from mpipipe.cluster.partition import Partition, ask, minutes, partition, seconds
from mpipipe.cluster.slurm import cores_here, domains_here
from mpipipe.cluster.spares import check_spares
from mpipipe.commands import run
from mpipipe.commands.levels import levels, show
from mpipipe.commands.nodes import Planned, by_split, fastest
from mpipipe.config import Config, load
from mpipipe.config.cluster import load_cluster
from mpipipe.errors import DeadlockError, LaunchError, MpipipeError, PlanError
from mpipipe.planner.alternatives import first_sentence
from mpipipe.planner.curve import Curve, Level, resource_curve
from mpipipe.planner.per_node import Split, best_split, splits
from mpipipe.planner.sizes import counted
from mpipipe.report.curve import splits_table
from mpipipe.report.progress import number
from mpipipe.state.files import write_text
from mpipipe.state.resume import newest, read_state
from mpipipe.state.rundir import CONFIG, claim_new, run_name
from mpipipe.values import Numerics

TRAIN = Path(__file__).resolve().parents[2] / "slurm" / "train.sh"
MOST_NODES = 16
SLACK, START_S = 1.5, 600.0  # what a run may take beyond its prediction, and to start
PARTITION = "SBATCH_PARTITION"
BEFORE_SCRIPT = {  # what sbatch takes from its environment before it takes it from a script
    "job-name": ("SBATCH_JOB_NAME",), "time": ("SBATCH_TIMELIMIT",), "partition": (PARTITION,),
    "output": ("SBATCH_OUTPUT",), "mem": ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU"),
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mpipipe submit",
        description="plan a run for several numbers of nodes, and submit it to Slurm with the best of them",
    )
    add = parser.add_argument
    add("config", help="the YAML file of a run")
    add("overrides", nargs="*", metavar="key=value", help="any key of the config")
    add("--nodes", type=_range, metavar="A-B", help="how many to choose from, such as 4 or 1-16")
    add("--time", type=_time, metavar="TIME", help="limit of the job, as sbatch takes it; else as predicted")
    add(
        "--partition", metavar="NAME", default=os.environ.get(PARTITION),
        help=f"of Slurm; without it {PARTITION}, or the default one",
    )  # fmt: skip
    add(
        "--cluster", metavar="FILE", action="append", default=[],
        help="its nodes, measured by calibrate; else with processors like this. Several, each with other "
        "ranks x threads on a node: the best of them",
    )  # fmt: skip
    add("--dry-run", action="store_true", help="write the batch script, but do not submit it")
    a = parser.parse_intermixed_args(list(argv))
    a.words = argv
    return run(lambda: _submit(a))


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of nodes, or a range such as 1-16")
    return least, most


def _time(text: str) -> float:
    limit = seconds(text)
    if not 0.0 < limit < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give one such as 90 (minutes) or 8:00:00")
    return limit


@dataclass(frozen=True)
class Choice:
    level: Level  # of the ranks that are no spares
    nodes: int
    split: Split
    steps: int
    max_ranks: int | None  # that may come later; None: the config, or nobody, says so

    @property
    def seconds(self) -> float:
        return self.level.step_s * self.steps

    def told(self) -> str:
        hours = self.nodes * self.seconds / 3600.0
        return (
            f"predicted: {counted(self.steps, 'step')} of {number(self.level.step_s)} s on "
            f"{counted(self.nodes, 'node')} take {minutes(self.seconds)} and cost {number(hours)} "
            "node-hours"
        )


def _submit(a: argparse.Namespace) -> None:
    if not a.dry_run and shutil.which("sbatch") is None:
        raise LaunchError(
            "there is no sbatch on the PATH: submit on a login node of the cluster, or write the batch "
            "script by --dry-run and take it there"
        )
    if not TRAIN.is_file():
        raise LaunchError(f"{TRAIN}: not found, and the batch script is made of it; submit in a clone")
    there, config = partition(a.partition), load(a.config, a.overrides)
    curve, choice = _choose(a, config, there)
    show(curve, a.config, None)
    limit_s = a.time or min(SLACK * choice.seconds + START_S, there.limit_s if there else 1e9)
    print(f"\n{choice.told()}")
    if choice.max_ranks is not None:
        print(f"blocks: for the {choice.max_ranks} ranks that may come (pipeline.max_ranks), as --nodes says")
    if limit_s < choice.seconds:
        print(f"note: the job ends after {minutes(limit_s)}; it saves before, and queues itself again")
    folder = _folder(config)
    script, resources = folder / "submit.sh", _resources(a, choice, limit_s, folder, run_name(config))
    write_text(script, _script(a, choice, resources, folder))
    words = [*_before_script(resources, os.environ), str(script)]
    if a.dry_run:
        print(f"not submitted; to submit it: {shlex.join(['sbatch', *words])}")
        return
    done = ask(
        ["sbatch", "--parsable", *words], "it may be submitted all the same: look at `squeue --me` before "
        "you submit it again",
    )  # fmt: skip
    if done.returncode:
        raise LaunchError(f"sbatch {script}: {done.stderr.strip()}; mend the script, and submit it as it is")
    job = done.stdout.strip().partition(";")[0]
    print(f"job {job} is submitted; its output: {folder / f'slurm-{job}.out'}")


def _choose(a: argparse.Namespace, config: Config, there: Partition | None) -> tuple[Curve, Choice]:
    """The knee of plans for 1, 2, 4 ... nodes, with the split of their cores that is best there."""
    least, most = a.nodes or (1, MOST_NODES)
    most = max(least, min(most, there.nodes)) if there and not a.cluster else most
    numbers, spares, asked = levels(f"{least}..{most}"), config.run.spares, config.pipeline
    begun, saved = _begun(config)
    if saved is not None:
        config = config.with_pipeline(threads=saved.threads, blocks=saved.blocks, max_ranks=None)
    may_come = most if a.nodes and begun is None else None  # else nobody has said that more would
    curves, assumed, failed = dict[Split, Curve](), dict[Split, Sequence[str]](), dict[str, MpipipeError]()
    why, ways = _ways(a, config, there, numbers, may_come)
    for split, planned in ways:
        try:
            check_spares(spares, most * split.per_node, config.run.recover)
            ranks = [n * split.per_node - spares for n in numbers]
            cluster_of = planned.cluster_with(split.per_node)
            curve = resource_curve(
                planned.costing.prediction_on, config.train.batch, [n for n in ranks if n > 0], cluster_of,
                planned.data.train_samples,
            )  # fmt: skip
        except (PlanError, DeadlockError, LaunchError) as error:
            failed[split.text] = error
        else:
            curves[split] = curve
            assumed[split] = planned.machine.assumed(cluster_of(curve.levels[-1].ranks))
    if not curves:
        raise next(iter(failed.values()))
    best = best_split(curves)
    beside = f"; {spares} of them all in reserve (run.spares)" if spares else ""
    print(f"{a.config}: {best.text} on each node{beside}", *assumed[best], sep="\n")
    print(f"threads: {'those of the run, as they decide its bits' if saved else why}")
    if len(curves) + len(failed) > 1:
        print("", *_weighed(curves, failed, numbers, spares, best), sep="\n")
    print()
    knee = curves[best].at_knee
    nodes = (knee.ranks + spares) // best.per_node if spares else knee.nodes
    more = most * best.per_node if may_come and most > nodes else None
    if begun is not None:
        more = begun.pipeline.max_ranks
    by_ranks = asked.blocks == "auto" and asked.max_ranks is None
    return curves[best], Choice(knee, nodes, best, config.train.steps, more if by_ranks else None)


def _begun(config: Config) -> tuple[Config | None, Numerics | None]:
    """The settings of the run that is in `run.dir`, and what decides its bits, once it has a checkpoint."""
    folder = Path(config.run.dir or "")
    if config.run.dir is None or not (folder / CONFIG).is_file():
        return None, None
    checkpoint = newest(folder)
    return load(folder / CONFIG), None if checkpoint is None else read_state(checkpoint).numerics


def _ways(
    a: argparse.Namespace, config: Config, there: Partition | None, numbers: Sequence[int],
    may_come: int | None,
) -> tuple[str, Iterator[tuple[Split, Planned]]]:  # fmt: skip
    """The splits of a node's cores to choose from, and why these. What is planned is good until the next
    one."""
    here, threads, least = binding(), config.pipeline.threads, numbers[0]
    mine = cores_here(here)
    cores, node_bytes = (there.cores, there.node_bytes) if there else (mine, None)
    if a.cluster:
        return "as --cluster says", _of_files(a.cluster, config, least, may_come)
    if threads == "auto" and cores <= mine:
        found = splits(cores, domains_here(here))
        busy = advice_here()
        why = f"each number was timed here (pipeline.threads=auto){f'. Note: {busy}' if busy else ''}"
        return why, by_split(config, found, least, node_bytes, may_come)
    each = max(1, cores // domains_here(here)) if threads == "auto" else threads
    why = f"pipeline.threads={threads}; auto weighs ranks x threads"
    if threads == "auto":
        why = (
            "the cores of a NUMA domain (pipeline.threads=auto). Others were not weighed, as those nodes "
            f"have {counted(cores, 'core')}, and this one {mine}: submit from one of them, or measure each "
            "way by calibrate, and give its file by --cluster"
        )
    planned = Planned(config.with_pipeline(threads=each), least, node_bytes, None, may_come)
    per_node = _per_node(planned, numbers, max(1, cores // each))
    return why, iter([(Split(per_node, each), planned)])


def _of_files(
    names: Sequence[str], config: Config, ranks: int, may_come: int | None
) -> Iterator[tuple[Split, Planned]]:
    """Of each cluster file the ranks x threads that it was measured with."""
    file_of = dict[Split, str]()
    for name in names:
        file, threads = load_cluster(name), config.pipeline.threads
        split = Split(file.ranks_per_node, file.first.threads if threads == "auto" else threads)
        if split in file_of:
            raise PlanError(
                f"--cluster {name}: {split.text} on each node, as in {file_of[split]}; leave one of them out"
            )
        file_of[split] = name
        yield split, Planned(config.with_pipeline(threads=split.threads), ranks, None, file, may_come)


def _per_node(planned: Planned, numbers: Sequence[int], most: int) -> int:
    """Ranks that are fastest on the fewest nodes that hold the model."""
    for nodes in numbers:
        try:
            return fastest(planned.by_ranks_per_node(nodes, most))
        except (PlanError, DeadlockError):
            if nodes == numbers[-1]:
                raise
    raise AssertionError("there is a number")


def _weighed(
    curves: Mapping[Split, Curve], failed: Mapping[str, MpipipeError], numbers: Sequence[int], spares: int,
    best: Split,
) -> Iterator[str]:  # fmt: skip
    yield "one step on each number of nodes, ms, by ranks x threads on a node:"
    yield splits_table(curves, numbers, spares)
    yield from (f"no plan for {text}: {first_sentence(error)}" for text, error in failed.items())
    if best.per_node == 1:
        yield f"one rank with all {counted(best.threads, 'thread')} is best for the cores of a node"


def _folder(config: Config) -> Path:
    if config.run.dir is None:
        return claim_new(config)
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _resources(
    a: argparse.Namespace, choice: Choice, limit_s: float, folder: Path, name: str
) -> dict[str, object]:
    """mem: all of a node, as was planned; `--exclusive` gives its cores only."""
    decided = {
        "job-name": name, "nodes": choice.nodes, "ntasks-per-node": choice.split.per_node,
        "cpus-per-task": choice.split.threads, "mem": 0, "time": minutes(limit_s), "partition": a.partition,
        "output": f"{folder.absolute()}/slurm-%j.out",
    }  # fmt: skip
    return {key: value for key, value in decided.items() if value is not None}


def _before_script(resources: Mapping[str, object], environ: Mapping[str, str]) -> list[str]:
    """Options that say again what the environment would take from the script."""
    return [
        f"--{key}={resources[key]}"
        for key, names in BEFORE_SCRIPT.items()
        if key in resources and any(name in environ for name in names)
    ]


def _script(a: argparse.Namespace, choice: Choice, resources: Mapping[str, object], folder: Path) -> str:
    """slurm/train.sh with the resources, the environment and the arguments that were decided."""
    kept = [line for line in TRAIN.read_text(encoding="utf-8").splitlines() if not _decided(line, resources)]
    end = max(i for i, line in enumerate(kept) if line.startswith("#SBATCH")) + 1
    more = [] if choice.max_ranks is None else [f"pipeline.max_ranks={choice.max_ranks}"]
    arguments = [str(Path(a.config).absolute()), *a.overrides, *more, f"run.dir={folder.absolute()}"]
    return "\n".join([
        kept[0],
        f"# Written by: python -m mpipipe submit {shlex.join(a.words)}".replace("\n", " "),
        f"# {choice.told()}",
        *kept[1:end],
        *(f"#SBATCH --{key}={_whole(str(value))}" for key, value in resources.items()),
        f"export MPIPIPE_VENV=${{MPIPIPE_VENV:-{shlex.quote(sys.prefix)}}}",
        f"set -- {shlex.join(arguments)}",
        *kept[end:],
        "",
    ])  # fmt: skip


def _whole(value: str) -> str:
    """sbatch splits a line at blanks."""
    return f'"{value}"' if " " in value else value


def _decided(line: str, resources: Mapping[str, object]) -> bool:
    """Whether a line of #SBATCH sets one of the resources."""
    return line.startswith("#SBATCH") and any(f"--{key}=" in line for key in resources)
