"""One peer, alone: `python -m benchmarks.peers zbv examples/gpt10m.yaml train.steps=3 [--choice 2,2,2,2]`.

The same model, data, first weights, micro-batches, products, optimizer and clipping as `mpipipe.train` with
this configuration, so its losses are those of ours. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import ALONE, SCHEDULES, SIDES
from benchmarks.peers.ranks import Failed, spawn

PREPARED = "prepared.json"


def run(a: argparse.Namespace, folder: Path) -> str:
    """What is printed: of `prepare` its findings, of a side its figures, or why it has none."""
    if not (folder / PREPARED).exists():
        from benchmarks.peers.prepare import prepare  # torch is slow to import, and not needed otherwise
        from mpipipe.config import load

        found = prepare(load(a.config, a.overrides), folder, a.ranks)
        (folder / PREPARED).write_text(json.dumps(found))
    text = (folder / PREPARED).read_text()
    if a.side == "prepare":
        return text
    found = json.loads(text)
    processes = 1 if a.side in ALONE else a.ranks
    best = ",".join(map(str, found["splits"][a.side][0])) if a.side in SCHEDULES else "micro"
    update = a.update or found["update"][str(a.ranks // processes)]
    where = ["--ranks", str(a.ranks), "--folder", str(folder)]
    chosen = ["--choice", a.choice or best, "--update", update]
    try:
        return spawn([a.side, a.config, *a.overrides, *where, *chosen], processes, a.timeout, a.keep)
    except Failed as error:
        return json.dumps({"failed": str(error)})


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="one stock peer, alone")
    parser.add_argument("side", choices=("prepare", *SIDES))
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for mpipipe.train")
    parser.add_argument("--ranks", type=int, default=2, help="or threads, of a side that is one process")
    parser.add_argument("--choice", default="", help="a split such as 4,4, or micro, or whole")
    parser.add_argument("--update", choices=("fused", "loop"), help="the optimizer's form; else the faster")
    parser.add_argument("--folder", default="", help="where `prepare` was; else it is done now")
    parser.add_argument("--keep", action="store_true", help="glibc keeps what is freed")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a run")
    a = parser.parse_args(argv)
    if "RANK" in os.environ:  # this process is one rank
        from benchmarks.peers.worker import work

        work(a)
    with tempfile.TemporaryDirectory() as temporary:
        print(run(a, Path(a.folder or temporary)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
