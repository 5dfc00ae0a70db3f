"""What a plan costs, and how good modelled costs are: one JSON line each.

    python -m benchmarks.planning [--ranks 16,64] [--models gpt10m,gpt85m,vgg,resnet,unet,llama]
    python -m benchmarks.planning --scale

Planning: `python -m mpipipe plan examples/llama-70b.yaml`, with and without examples/cluster.yaml: seconds,
and the most memory of the process. Costs: every distinct group of a model is timed as a run does, and
modelled from its operators: modelled seconds over timed ones, of the whole model and of single groups, and
how well they agree on which groups are heavy (Spearman's rank correlation). Scale: planning time against
groups, nodes and ranks (benchmarks/scale.py), and a table at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.common import ROOT, config_of, environment, machine, run
from benchmarks.scale import CASES, table
from mpipipe.config import Config, load, parse
from mpipipe.data import open_dataset
from mpipipe.graph.pieces import Sample, pieces
from mpipipe.graph.rates import Trials, sample_of
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.graph.work import Tallier
from mpipipe.models import build

TEXTS = {
    "vgg": "{name: vgg, size: 32, channels: 3, blocks: [2, 2, 3, 3], widths: [64, 128, 256, 512]}",
    "resnet": "{name: resnet, size: 32, channels: 3, blocks: [2, 2, 2], widths: [64, 128, 256]}",
    "llama": "{name: llama, vocab: 4096, layers: 4, d_model: 512, heads: 8, d_ff: 1408, context: 256}",
}


def planning(ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    """In a process of its own, whose memory is the one that counts."""
    command = [
        sys.executable,
        "-m",
        "mpipipe",
        "plan",
        config_of("llama-70b"),
        "--ranks",
        str(ranks),
        *arguments,
    ]
    start = time.perf_counter()
    child = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        text = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"{' '.join(command)}\nended with code {child.returncode}")
    step = next(line for line in text.splitlines() if line.startswith("step "))
    return {
        "plan": "llama-70b", "ranks": ranks, "cluster": bool(arguments),
        "seconds": time.perf_counter() - start, "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024, "step": step,
    }  # fmt: skip


def costs(model: str) -> dict[str, Any]:
    """Modelled and timed here, on one thread."""
    config = _config(model)
    built = build(config, data := open_dataset(config, "."))
    source = ModelSource(built.model, 0)
    variants = Variants(source, built.loss, data.specs, config.micro_batch, config.train.precision)
    parts = pieces(variants.primary, variants.graph, variants.uses)
    tallier = Tallier(variants.primary, config.train.precision, ranks=2)
    rates, distinct = Trials(tallier.chill), {p.key: p for p in parts}
    timed = {key: _seconds(tallier.sample(p)) for key, p in distinct.items()}
    modelled = {key: _seconds(sample_of(tallier.tally(p), rates)) for key, p in distinct.items()}
    ratios = [modelled[key] / timed[key] for key in distinct]
    whole = sum(modelled[p.key] for p in parts) / sum(timed[p.key] for p in parts)
    places = [np.argsort(np.argsort([found[key] for key in distinct])) for found in (timed, modelled)]
    return {
        "model": model, "groups": len(parts), "distinct": len(distinct), "modelled_over_timed": whole,
        "by_group": {"least": min(ratios), "median": statistics.median(ratios), "most": max(ratios)},
        "rank_correlation": float(np.corrcoef(*places)[0, 1]), "machine": machine(),
    }  # fmt: skip


def scale() -> None:
    """Each case in a process of its own."""
    rows = []
    for case in CASES:
        text = run([sys.executable, "-m", "benchmarks.scale", *map(str, case)])
        rows.append(json.loads(text))
        print(text.strip(), flush=True)
    print(json.dumps(machine()))
    print(table(rows))


def _seconds(s: Sample) -> float:
    return max(s.seconds, 1e-9)


def _config(model: str) -> Config:
    if model in TEXTS:
        return parse(f"model: {TEXTS[model]}\ndata: {{name: synthetic}}\ntrain: {{batch: 32}}")
    vocab = ["model.vocab=256"] if model == "gpt10m" else []
    return load(config_of(model), ["data={name: synthetic}", *vocab])


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="what a plan costs, and how good modelled costs are")
    parser.add_argument("--ranks", default="16,64", help="of the plans, with commas; empty: none")
    parser.add_argument("--models", default="gpt10m,gpt85m,vgg,resnet,unet,llama", help="empty: none")
    parser.add_argument(
        "--scale", action="store_true", help="large plans from made-up costs, and nothing else"
    )
    a = parser.parse_args(argv)
    if a.scale:
        return scale()
    torch.set_num_threads(1)
    for ranks in filter(None, a.ranks.split(",")):
        for arguments in (["--cluster", str(ROOT / "examples" / "cluster.yaml")], []):
            print(json.dumps(planning(int(ranks), arguments)), flush=True)
    for model in filter(None, a.models.split(",")):
        print(json.dumps(costs(model)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
