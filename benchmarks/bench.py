"""mpipipe against the best hand-written peer, model by model: one JSON line each.

    python -m benchmarks.bench [--models gpt10m,gpt85m] [--rounds 5] [--steps 8] [--ranks 2] [--gemm mkl]

Ours is the real command line, read from its summary.json. The peer is `peer_pipelining.py` with the
best of all splits: the time of each layer ranks them, the first `--candidates` are run, the fastest
stays. Then the sides take turns, ours, peer, ours, peer, each run in fresh processes; a side's
figure is the median over its rounds. ratio_to_best_peer = peer's step seconds / ours: above 1, we
are faster. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import config_of, launch, machine, run

PEER = "torch.distributed.pipelining Schedule1F1B, gloo"


def ours(model: str, ranks: int, overrides: Sequence[str]) -> dict[str, Any]:
    """One run of `python -m mpipipe.train`."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        launch(ranks, "-m", "mpipipe.train", config_of(model), *overrides, f"run.dir={run_dir}")
        summary = json.loads((run_dir / "summary.json").read_text())
        plan = json.loads((run_dir / "plan.json").read_text())
    kept = ("step_s", "peak_bytes", "predicted_step_s", "predicted_peak_bytes", "bubble", "predicted_bubble")
    return {key: summary[key] for key in kept} | {"cuts": plan["layout"]["cuts"]}


def peer(model: str, ranks: int, overrides: Sequence[str], *more: str) -> dict[str, Any]:
    """One run of the peer, or with --rank-splits, its splits."""
    arguments = [config_of(model), *overrides, "--ranks", str(ranks), *more]
    text = run([sys.executable, "-m", "benchmarks.peer_pipelining", *arguments])
    found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return found


def best_split(model: str, ranks: int, overrides: Sequence[str], candidates: int, steps: int) -> str:
    """By layer times, then by short runs of the first few."""
    ranked = peer(model, ranks, overrides, "--rank-splits")["splits"][:candidates]
    texts = [",".join(map(str, split)) for split in ranked]
    if len(texts) == 1:
        return texts[0]
    short = [*overrides, f"train.steps={steps}"]
    seconds = {text: peer(model, ranks, short, "--split", text)["step_s"] for text in texts}
    say(f"{model}: peer's splits, seconds per step: {seconds}")
    return min(seconds, key=lambda text: seconds[text])


def compare(model: str, a: argparse.Namespace) -> dict[str, Any]:
    """Both sides of one model, in turns."""
    overrides = [f"train.steps={a.steps}", f"kernels.gemm={a.gemm}", "pipeline.threads=1"]
    split = a.split or best_split(model, a.ranks, overrides, a.candidates, a.search_steps)
    mine, theirs = [], []
    for i in range(a.rounds):
        load = os.getloadavg()[0]
        mine.append(ours(model, a.ranks, overrides))
        theirs.append(peer(model, a.ranks, overrides, "--split", split))
        say(
            f"{model} round {i + 1}/{a.rounds}, seconds per step: ours {mine[-1]['step_s']:.4f}, "
            f"peer {theirs[-1]['step_s']:.4f} (load before: {load:.1f})"
        )
    us, them = _medians(mine), _medians(theirs)
    us |= {key: mine[-1][key] for key in ("cuts", "predicted_peak_bytes")}
    us |= {
        key: statistics.median(r[key] for r in mine)
        for key in ("predicted_step_s", "bubble", "predicted_bubble")
    }
    by_round = [t["step_s"] / m["step_s"] for m, t in zip(mine, theirs, strict=True)]
    return {
        "model": model,
        "ratio_to_best_peer": them["step_s"] / us["step_s"],
        "ratio_by_round": by_round,
        "peak_bytes_ratio_to_best_peer": max(them["peak_bytes"]) / max(us["peak_bytes"]),
        "best_peer": PEER,
        "mpipipe": us,
        "peer": them | {"split": theirs[-1]["split"]},
        "settings": {
            "ranks": a.ranks, "threads": 1, "gemm": a.gemm, "steps": a.steps, "rounds": a.rounds,
            "candidates": 0 if a.split else a.candidates,
        },
        "machine": machine(),
    }  # fmt: skip


def _medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    peaks = [statistics.median(rank) for rank in zip(*(r["peak_bytes"] for r in runs), strict=True)]
    seconds = [r["step_s"] for r in runs]
    return {
        "step_s": statistics.median(seconds),
        "step_s_by_round": seconds,
        "peak_bytes": list(map(int, peaks)),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="mpipipe against the best hand-written peer")
    parser.add_argument("--models", default="gpt10m,gpt85m", help="names in examples/, with commas")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument(
        "--steps", type=int, default=8, help="optimizer steps of a run; the first is not counted"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gemm", choices=("mkl", "onednn"), default="mkl", help="for both sides")
    parser.add_argument("--candidates", type=int, default=3, help="splits of the peer that are run")
    parser.add_argument("--search-steps", type=int, default=4, help="steps of each of these runs")
    parser.add_argument("--split", default="", help="the peer's split, such as 3,3; not searched then")
    a = parser.parse_args(argv)
    for model in a.models.split(","):
        print(json.dumps(compare(model, a)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
