"""`python -m mpipipe doctor`, alone or under mpirun or srun: what is wrong here, and the line that mends it.

What it needs is imported late: it is to say, too, that numpy or torch is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mpipipe.cluster.doctor.watch import LATER_S
from mpipipe.cluster.launch import launcher_rank
from mpipipe.commands.arguments import positive


def main(argv: Sequence[str]) -> int:
    """1 if there is a problem, else 0. Rank 0 tells it, or the first of several processes that are alone."""
    options = _parser().parse_args(argv)
    try:
        from mpipipe.commands.examine import Doctor

        return Doctor(options).work()
    except ImportError as error:
        return _not_started(" ".join(str(error).split()), options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpipipe doctor",
        description="What is wrong with this machine, this MPI or this launch, and the line that mends it. "
        "Alone, or under mpirun or srun as a training would be started; exit code 1 if there is a problem.",
    )
    parser.add_argument(
        "--threads", type=positive, default=1,
        help="pipeline.threads of the training (default: %(default)s, as there); it ignores OMP_NUM_THREADS",
    )  # fmt: skip
    parser.add_argument(
        "--bind", choices=("auto", "none"), default="auto",
        help="pipeline.bind of the training (default: %(default)s, as there)",
    )  # fmt: skip
    parser.add_argument(
        "--dir", type=Path, default=Path("runs"), help="where runs will go (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="the findings and all facts as JSON")
    return parser


def _not_started(text: str, as_json: bool) -> int:
    """Tells the one finding without the imports that values and texts need."""
    if launcher_rank(os.environ) != 0:
        time.sleep(LATER_S)  # the first mostly lacks the same: it says so and thereby ends the job
        print(f"mpipipe doctor: {platform.node()}: {text}", file=sys.stderr)
        return 1
    finding = {"section": "start", "level": "PROBLEM", "text": text, "fix": "make setup"}
    if as_json:
        print(json.dumps({"findings": [finding], "ranks": [], "seconds": 0.0}), flush=True)
    else:
        print(f"start\n  PROBLEM  {text}\n           fix: make setup\n1 problem, 0 notes", flush=True)
    return 1
