"""Messages between two virtual hosts with a shaped network: one JSON line for each model.

    MPIPIPE_TESTBED=<folder of hosts-up> python -m benchmarks.hosts [--models gpt85m,unet]

gpt85m  1 Gbit/s, every schedule tried: the share of the step in which a rank waits for a message that is
        on its way, beside the same run with 1f1b
unet    100 Mbit/s: where the model is cut, and what the cut takes there that would be best at 10 Gbit/s;
        predicted beside measured

Needs root and the test bed; hosts and network share the cores of this machine. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.bars import at_most
from benchmarks.common import AS_PLANNED, config_of, environment, machine, run, say
from mpipipe.planner import make_plan
from mpipipe.report.account import account
from mpipipe.report.plan_file import plan_text
from mpipipe.report.trace import read_trace
from mpipipe.values import Costs, Plan, Report, from_json

GROUP = ("--group", "bench", "--prefix", "bench", "--subnet", "10.78.0")
DELAY = "50us"
OF_GPT, FAST, SLOW = "1gbit", "10gbit", "100mbit"
BAR = 0.03  # of the step, exposed
PASSED = ("PATH", "PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VIRTUAL_ENV")


def testbed_of(parser: argparse.ArgumentParser) -> Path:
    """The folder of hosts-up; ends the program where there is none."""
    testbed = os.environ.get("MPIPIPE_TESTBED")
    if not testbed:
        parser.error("needs virtual hosts; set MPIPIPE_TESTBED to the folder of hosts-up")
    return Path(testbed)


class Hosts:
    """Two hosts for as long as it is open; folder: for their runs."""

    def __init__(self, testbed: Path, folder: Path) -> None:
        self._testbed, self._folder, self._runs = testbed, folder, 0

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        run([str(self._testbed / "hosts-down"), *GROUP[:2]])

    def shape(self, rate: str) -> None:
        """rate: such as 1gbit."""
        run([str(self._testbed / "hosts-up"), "-n", "2", "--rate", rate, "--delay", DELAY, *GROUP])

    def train(self, model: str, *settings: str) -> Path:
        """The folder of a run."""
        self._runs += 1
        folder = self._folder / str(self._runs)
        more = [f"run.dir={folder}", AS_PLANNED, *settings]
        say(" ".join([model, *settings]))
        self.launch(2, "-m", "mpipipe.train", config_of(model), *more)
        return folder

    def launch(self, ranks: int, *arguments: str) -> str:
        """What `python arguments...` prints on that many ranks, spread evenly."""
        passed = [word for name in PASSED if name in environment() for word in ("-x", name)]
        start = [str(self._testbed / "hosts-mpirun"), *GROUP[:2], "-n", str(ranks), "--", *passed, "--"]
        return run([*start, sys.executable, *arguments])


def plan_of(folder: Path) -> Plan:
    return from_json(Plan, (folder / "plan.json").read_text())


def planned(folder: Path) -> Costs:
    """What the run was planned on."""
    costs = plan_of(folder).costs
    assert costs is not None
    return costs


def told(folder: Path) -> dict[str, Any]:
    """What a run was predicted to do, and did."""
    report, plan = from_json(Report, (folder / "summary.json").read_text()), plan_of(folder)
    timelines = read_trace(folder / "timeline.json").timelines
    exposed = {
        name: [rank.exposed_s / timeline.makespan_s for rank in account(timeline)]
        for name, timeline in timelines.items()
    }
    return {
        "schedule": plan.layout.schedule,
        "cuts": plan.layout.cuts,
        "ranks": [ranks[0] for ranks in plan.layout.ranks],
        "step_s": report.step_s,
        "predicted_step_s": report.predicted_step_s,
        "exposed_share": max(exposed["measured"]),
        "predicted_exposed_share": max(exposed["predicted"]),
        "exposed_s_by_rank": [rank.exposed_s for rank in report.ranks],
        "sent_bytes_by_rank": [rank.sent_bytes for rank in report.ranks],
        "messages": report.messages,
    }


def gpt85m(hosts: Hosts) -> dict[str, Any]:
    hosts.shape(OF_GPT)
    sides = {
        schedule: told(hosts.train("gpt85m", f"pipeline.schedule={schedule}", "train.steps=4"))
        for schedule in ("auto", "1f1b")
    }
    found = sides["auto"]["exposed_share"]
    return {"rate": OF_GPT, "exposed_share": found, **at_most(found, BAR), "sides": sides}


def unet(hosts: Hosts) -> dict[str, Any]:
    """The links alone decide here: both cuts are of the costs that the slow run took."""
    steps = ("train.steps=30", "eval.every=0")
    hosts.shape(FAST)
    links = planned(hosts.train("unet", *steps)).cluster.links
    hosts.shape(SLOW)
    folder = hosts.train("unet", *steps)
    slow, plan, costs = told(folder), plan_of(folder), planned(folder)
    on_fast = replace(costs, cluster=replace(costs.cluster, links=links))
    layout = plan.layout
    other, _ = make_plan(on_fast, plan.numerics, layout.schedule, layout.receive_window, 2)
    file = folder / "other.json"
    file.write_text(plan_text(other))
    kept = told(hosts.train("unet", *steps, "--plan", str(file)))
    gain = {key: kept[key] / slow[key] for key in ("predicted_step_s", "step_s")}
    sides = {f"cut for {SLOW}": slow, f"cut for {FAST}": kept}
    return {"rate": SLOW, "moved": kept["cuts"] != slow["cuts"], "gain_of_the_move": gain, "sides": sides}


MODELS = {"gpt85m": gpt85m, "unet": unet}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="messages between two virtual hosts")
    parser.add_argument("--models", default=",".join(MODELS), help="with commas")
    models = parser.parse_args(argv).models.split(",")
    if unknown := set(models) - MODELS.keys():
        parser.error(f"--models: there are {', '.join(MODELS)}, not {', '.join(sorted(unknown))}")
    testbed = testbed_of(parser)
    with tempfile.TemporaryDirectory() as folder, Hosts(testbed, Path(folder)) as hosts:
        for model in models:
            found = {"model": model, "delay": DELAY, **MODELS[model](hosts), "machine": machine()}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
