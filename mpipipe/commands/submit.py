"""`python -m mpipipe submit config.yaml [--nodes 1-16]`: how many nodes are worth it, then a batch script
with what was decided, then sbatch.

    sinfo -> plans for several numbers of nodes -> the knee -> RUN/submit.sh, made of slurm/train.sh -> sbatch
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpipipe.cluster.doctor.machine import binding
from mpipipe.cluster.partition import ASK_S, Partition, minutes, partition, seconds
from mpipipe.cluster.slurm import threads_of_a_domain
from mpipipe.cluster.spares import check_spares
from mpipipe.commands import run
from mpipipe.commands.levels import levels, show
from mpipipe.commands.nodes import Planned, fastest
from mpipipe.config import Config, load
from mpipipe.config.cluster import load_cluster
from mpipipe.errors import DeadlockError, LaunchError, PlanError
from mpipipe.planner.curve import Curve, Level, resource_curve
from mpipipe.planner.sizes import counted
from mpipipe.report.progress import number
from mpipipe.state.files import write_text
from mpipipe.state.rundir import claim_new, run_name

TRAIN = Path(__file__).resolve().parents[2] / "slurm" / "train.sh"
MOST_NODES = 16
SLACK, START_S = 1.5, 600.0  # what a run may take beyond its prediction, and to start


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
    add("--partition", metavar="NAME", help="of Slurm; without it, the default one")
    add("--cluster", metavar="FILE", help="its nodes, measured by calibrate; else with processors like this")
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
    per_node: int
    threads: int
    steps: int

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
    if limit_s < choice.seconds:
        print(f"note: the job ends after {minutes(limit_s)}; it saves before, and queues itself again")
    folder = _folder(config)
    script = folder / "submit.sh"
    write_text(script, _script(a, choice, limit_s, folder, run_name(config)))
    if a.dry_run:
        print(f"not submitted; to submit it: sbatch {script}")
        return
    done = subprocess.run(["sbatch", "--parsable", script], capture_output=True, text=True, timeout=ASK_S)
    if done.returncode:
        raise LaunchError(f"sbatch {script}: {done.stderr.strip()}; mend the script, and submit it as it is")
    job = done.stdout.strip().partition(";")[0]
    print(f"job {job} is submitted; its output: {folder / f'slurm-{job}.out'}")


def _choose(a: argparse.Namespace, config: Config, there: Partition | None) -> tuple[Curve, Choice]:
    """The knee of plans for 1, 2, 4 ... nodes."""
    least, most = a.nodes or (1, MOST_NODES)
    most = max(least, min(most, there.nodes)) if there and not a.cluster else most
    here, file = binding(), load_cluster(a.cluster) if a.cluster else None
    cores = there.cores if there else here.quota
    threads = config.pipeline.threads
    if threads == "auto":
        threads = file.first.threads if file else threads_of_a_domain(cores, here)
    settled = load(a.config, [*a.overrides, f"pipeline.threads={threads}"])
    numbers = levels(f"{least}..{most}")
    spares = config.run.spares
    planned = Planned(settled, least, there.node_bytes if there else None, file)
    per_node = file.ranks_per_node if file else _per_node(planned, numbers, max(1, cores // threads))
    check_spares(spares, numbers[-1] * per_node, config.run.recover)
    curve = resource_curve(
        planned.costing.prediction_on, config.train.batch,
        [n * per_node - spares for n in numbers if n * per_node > spares],
        planned.cluster_with(per_node), planned.data.train_samples,
    )  # fmt: skip
    beside = f"; {spares} of them all in reserve (run.spares)" if spares else ""
    each = f"{per_node} ranks x {threads} threads on each node{beside}"
    print(f"{a.config}: {each}", *_lines(planned, curve), sep="\n")
    knee = next(level for level in curve.levels if level.ranks == curve.knee)
    nodes = (knee.ranks + spares) // per_node if spares else knee.nodes
    return curve, Choice(knee, nodes, per_node, threads, config.train.steps)


def _per_node(planned: Planned, numbers: Sequence[int], most: int) -> int:
    """Ranks that are fastest on the fewest nodes that hold the model."""
    for nodes in numbers:
        try:
            return fastest(planned.by_ranks_per_node(nodes, most))
        except (PlanError, DeadlockError):
            if nodes == numbers[-1]:
                raise
    raise AssertionError("there is a number")


def _lines(planned: Planned, curve: Curve) -> list[str]:
    most = planned.machine.cluster(curve.levels[-1].ranks, planned.costing.base_bytes)
    return [*planned.machine.assumed(most), ""]


def _folder(config: Config) -> Path:
    if config.run.dir is None:
        return claim_new(config)
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _script(a: argparse.Namespace, choice: Choice, limit_s: float, folder: Path, name: str) -> str:
    """slurm/train.sh with the resources, the environment and the arguments that were decided."""
    resources = {
        "job-name": name, "nodes": choice.nodes, "ntasks-per-node": choice.per_node,
        "cpus-per-task": choice.threads, "time": minutes(limit_s), "partition": a.partition,
        "output": f'"{folder.absolute()}/slurm-%j.out"',  # sbatch splits a line at blanks
    }  # fmt: skip
    kept = [line for line in TRAIN.read_text(encoding="utf-8").splitlines() if not _decided(line, resources)]
    end = max(i for i, line in enumerate(kept) if line.startswith("#SBATCH")) + 1
    arguments = [str(Path(a.config).absolute()), *a.overrides, f"run.dir={folder.absolute()}"]
    return "\n".join([
        kept[0],
        f"# Written by: python -m mpipipe submit {shlex.join(a.words)}",
        f"# {choice.told()}",
        *kept[1:end],
        *(f"#SBATCH --{key}={value}" for key, value in resources.items() if value is not None),
        f"export MPIPIPE_VENV=${{MPIPIPE_VENV:-{shlex.quote(sys.prefix)}}}",
        f"set -- {shlex.join(arguments)}",
        *kept[end:],
        "",
    ])  # fmt: skip


def _decided(line: str, resources: dict[str, object]) -> bool:
    """Whether a line of #SBATCH sets one of the resources."""
    return line.startswith("#SBATCH") and any(f"--{key}=" in line for key in resources)
