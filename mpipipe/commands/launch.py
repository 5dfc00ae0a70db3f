"""`python -m mpipipe launch config.yaml [key=value ...]`, inside a Slurm job: the line that starts its ranks.

    plan --from-allocation -> Assignment -> launch -> a line for the shell -> run, the supervisor -> launcher

It is printed, not run, so that the shell that runs it may hand signals on. Why it is that launcher goes to
the standard error output.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from mpipipe.cluster.mpi import installed
from mpipipe.cluster.slurm import Assignment
from mpipipe.cluster.starting import CONTAINER, start
from mpipipe.commands import run
from mpipipe.commands.allocation import assignment
from mpipipe.commands.job import add_arguments, run_of_job
from mpipipe.errors import LaunchError
from mpipipe.state.rundir import FINISHED
from mpipipe.values import from_json


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mpipipe launch",
        description="the line that starts the ranks of this Slurm job; slurm/train.sh runs it",
    )
    add_arguments(parser)
    parser.add_argument(
        "--assignment", metavar="FILE", help="of plan --from-allocation; without it, planned now"
    )
    parser.add_argument(
        "--unfinished", action="store_true",
        help="no line, but the run folder and exit code 0 where the run stopped before its end and the job "
        "is to be started again",
    )  # fmt: skip
    parser.add_argument(
        "--asked",
        action="store_true",
        help="with --unfinished: it was asked to stop, though it may have failed",
    )
    a = parser.parse_intermixed_args(list(argv))
    if not a.unfinished:
        return run(lambda: _print_line(a))
    again: list[bool] = []
    return run(lambda: again.append(_goes_on(a))) or int(not again[0])


def _goes_on(a: argparse.Namespace) -> bool:
    job = run_of_job(a, os.environ)
    again = job.is_to_go_on(a.asked)
    if again:
        print(job.folder)
    return again


def _print_line(a: argparse.Namespace) -> None:
    job = run_of_job(a, os.environ)
    if job.resume and job.ended == "finished":
        _say(f"{job.folder}: {FINISHED}")
        print("true")
        return
    if a.assignment:
        assigned = _read(a.assignment)
    else:
        assigned, lines = assignment(a)
        _say(*lines)
    mpi, image = installed(os.environ), os.environ.get(CONTAINER)
    found = start(assigned, mpi, os.environ)
    _say(f"launcher: {shlex.join(found.launcher)} ({mpi}; {found.why})")
    count = ["-n", str(assigned.ranks)]
    if image:  # from within, no launcher of the site's can be reached
        inside = ["apptainer", "exec", image, "python3", "-m", "mpipipe.train", *job.arguments]
        line = [*found.launcher, *count, *inside]
    else:
        line = [sys.executable, "-m", "mpipipe", "run", *job.arguments, *count, "--", *found.launcher]
    print(shlex.join(["env", *found.environ, *line]))


def _read(path: str) -> Assignment:
    try:
        return from_json(Assignment, Path(path).read_bytes())
    except (OSError, ValidationError) as error:
        raise LaunchError(
            f"--assignment {path}: cannot be read ({error}); write one by python -m mpipipe plan config.yaml "
            f"--from-allocation -o {path}"
        ) from error


def _say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)
