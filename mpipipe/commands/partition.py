"""`python -m mpipipe partition GRAPH`: which device holds which operator of a graph that another planner has
profiled, exact where it can be proved in time, always with a bound. No MPI, no torch.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mpipipe.commands import run
from mpipipe.commands.arguments import seconds
from mpipipe.commands.graphs import MS, is_profile, parse_json, parse_profile
from mpipipe.commands.output import check_folder, write_output, writing
from mpipipe.config.sections import Size
from mpipipe.errors import PlanError
from mpipipe.planner.placement import Placement, Problem, Profile, Replicated, place, replicate
from mpipipe.planner.sizes import counted, size_text
from mpipipe.report.placement import device_names, placement_text, replicated_text


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    a = _parser().parse_args(argv)
    return run(lambda: _partition(a))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpipipe partition",
        description="Which device holds which node of a graph, so that the most loaded one is loaded least.",
    )
    add = parser.add_argument
    add("graph", help="JSON of dnn-partitioning, or graph.txt of PipeDream")
    add("--devices", type=int, metavar="N", help="accelerators; default: maxFPGAs of the JSON")
    add(
        "--memory",
        type=_bytes,
        metavar="SIZE",
        help="of each, such as 16GiB; default: maxSizePerFPGA, or no limit",
    )
    add("--contiguous", action="store_true", help="devices in an order: no forward edge goes back")
    add("--replicas", action="store_true", help="of a graph.txt: stages with copies, as PipeDream plans")
    add(
        "--bandwidth",
        type=_bytes_per_s,
        metavar="SIZE",
        help="of a graph.txt: a second between two devices, such as 1.25e9 or 10GB",
    )
    add("--budget", type=seconds, default=10.0, metavar="TIME", help="such as 500ms or 2m; default: 10s")
    add("-o", "--output", metavar="FILE", help="write load, bound, gap, stages and seconds there, as JSON")
    return parser


def _bytes(text: str) -> int:
    try:
        return TypeAdapter(Size).validate_python(text)
    except ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r}; give bytes, or a size such as 16GiB") from None


def _bytes_per_s(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return float(TypeAdapter(Size).validate_python(text.removesuffix("/s")))
    except ValidationError:
        raise argparse.ArgumentTypeError(
            f"{text!r}; give bytes per second, such as 1.25e9, or a size, such as 10GB"
        ) from None


def _partition(a: argparse.Namespace) -> None:
    if a.output:
        check_folder(a.output)
    text = _read(a.graph)
    if is_profile(text):
        profile = parse_profile(text, a.graph)
        _needs_profile_options(a)
        if a.replicas:
            _replicas(a, profile)
            return
        problem = profile.problem(a.devices, a.bandwidth, math.inf if a.memory is None else a.memory)
    else:
        for option, given in (("--replicas", a.replicas), ("--bandwidth", a.bandwidth is not None)):
            if given:
                raise PlanError(
                    f"{option}: for a graph.txt of PipeDream, but {a.graph} is JSON; leave it out"
                )
        problem = parse_json(text, a.graph, a.devices, a.memory)
    _place(a, problem)


def _needs_profile_options(a: argparse.Namespace) -> None:
    if a.devices is None:
        raise PlanError(f"{a.graph}: a graph.txt says nothing of devices; give --devices N")
    if a.bandwidth is None or not 0 < a.bandwidth < math.inf:
        given = "is not given" if a.bandwidth is None else f"{a.bandwidth}"
        raise PlanError(
            f"{a.graph}: --bandwidth {given}; give bytes per second between two devices, such as 1.25e9"
        )
    if a.replicas and (a.memory is not None or a.contiguous):
        raise PlanError(
            "--replicas: plans without a limit of memory, and is contiguous; leave the others out"
        )


def _place(a: argparse.Namespace, problem: Problem) -> None:
    placement = place(problem, a.graph, contiguous=a.contiguous, budget_s=a.budget)
    size = f"{counted(len(problem.operators), 'node')}, {counted(len(problem.edges), 'edge')}"
    print(f"{a.graph}: {size} on {_devices(problem)}\n")
    print(placement_text(problem, placement))
    held: list[list[int | str]] = [[] for _ in range(problem.n_devices)]
    for operator, device in zip(problem.operators, placement.device_of, strict=True):
        held[device].append(operator.id)
    while not held[-1]:
        held.pop()
    _write(a.output, placement, {"stages": held, "devices": device_names(problem)[: len(held)]})


def _devices(problem: Problem) -> str:
    memory = "" if problem.capacity_bytes == math.inf else f" of {size_text(int(problem.capacity_bytes))}"
    cpus = f" and {counted(problem.n_cpus, 'CPU')}" if problem.n_cpus else ""
    return f"{counted(problem.n_accelerators, 'accelerator')}{memory}{cpus}"


def _replicas(a: argparse.Namespace, profile: Profile) -> None:
    plan = replicate(profile, a.graph, a.devices, a.bandwidth)
    size = f"{counted(len(profile.layers), 'node')} on {counted(a.devices, 'device')}"
    print(f"{a.graph}: {size}, {a.bandwidth / 1e9:g} GB/s\n")
    print(replicated_text(profile, plan))
    stages = [[profile.layers[v].id for v in stage.layers] for stage in plan.stages]
    _write(a.output, plan, {"stages": stages, "replicas": [stage.copies for stage in plan.stages]})


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror}); name a graph") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: is not UTF-8 text (byte {error.start}); name a graph") from error


def _write(output: str | None, plan: Placement | Replicated, more: dict[str, Any]) -> None:
    """Loads in milliseconds, as the graphs have them. A gap that is unbounded is null."""
    if output is None:
        return
    gap = plan.gap if math.isfinite(plan.gap) else None
    found = {
        "load": plan.load_s / MS,
        "bound": plan.bound_s / MS,
        "gap": gap,
        "seconds": plan.seconds,
        **more,
    }
    with writing(output, move="name a file of yours"):
        write_output(Path(output), json.dumps(found) + "\n")
