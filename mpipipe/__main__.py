"""`python -m mpipipe <command>`: the sub-commands, each a module with `main(argv) -> int`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from mpipipe.errors import did_you_mean, nearest

COMMANDS = {
    "train": ("mpipipe.train", "train as a config says; under mpirun, on as many ranks as it starts"),
    "run": ("mpipipe.commands.supervise", "train, and go on after failures; it starts mpirun or srun itself"),
    "plan": ("mpipipe.commands.plan", "the cut, time and memory on any number of ranks; without mpirun"),
    "partition": ("mpipipe.commands.partition", "which device holds which node of a graph from elsewhere"),
    "draw": ("mpipipe.commands.draw", "draw a plan, or the measured step of a run"),
    "report": ("mpipipe.commands.report", "a run as a page, or two runs side by side"),
    "doctor": ("mpipipe.commands.doctor", "what is wrong with this machine, alone or under mpirun or srun"),
    "calibrate": (
        "mpipipe.commands.calibrate",
        "measure the ranks that it is started on, for plan --cluster",
    ),
    "checkpoint": (
        "mpipipe.commands.checkpoint",
        "inspect, verify, export or merge checkpoints; without mpirun",
    ),
    "submit": ("mpipipe.commands.submit", "choose a number of nodes, and submit the run to Slurm"),
    "launch": ("mpipipe.commands.launch", "the line that starts the ranks of this Slurm job"),
    "tokenize": ("mpipipe.data.tokenize", "make a token file of text, on all cores; without mpirun"),
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        lines = [f"  {name:10} {text}" for name, (_, text) in COMMANDS.items()]
        if argv and argv[0] not in ("-h", "--help"):
            meant = did_you_mean(nearest(argv[0], COMMANDS))
            print(f"mpipipe: {argv[0]!r} is no command{meant}", file=sys.stderr)
        print("usage: python -m mpipipe <command> ...\n" + "\n".join(lines), file=sys.stderr)
        return 2
    code: int = importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
