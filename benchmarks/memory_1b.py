"""A model of a billion parameters on eight ranks: every rank's memory is that of its stage.

    python -m benchmarks.memory_1b [--ranks 8] [--steps 2] [--limit-gib 20]

SGD without momentum, short samples, ranks beyond the number of cores: it shows memory, not speed.
Prints one JSON line: peak bytes per rank, measured and predicted, beside the bytes of the whole
model (weights; weights and gradients). Takes the ranks down if they take more than the limit of
the machine's memory. Needs about 5 GB of disk for the checkpoint, removed at the end.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, environment, machine, say

CONFIG = """
model: {name: gpt, layers: 20, d_model: 2048, heads: 16, context: 64}
train: {optimizer: sgd, momentum: 0.0, lr: 0.01, weight_decay: 0.0, warmup: 0}
eval: {every: 0, batches: 1, batch: 1}
run: {log_every: 1}
sample: {length: 0}
"""
SPARE_BYTES = 2 << 30  # left to the machine beside what the ranks may take


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def guarded(command: Sequence[str], limit_bytes: int) -> int:
    """Runs a command; the most memory that the machine had less than before. Ends it beyond the limit."""
    before = available_bytes()
    least = before
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            least = min(least, available_bytes())
            if before - least > limit_bytes:
                process.send_signal(signal.SIGTERM)  # mpirun takes its ranks with it
                process.wait()
                sys.exit(f"stopped: {before - least} bytes taken, the limit is {limit_bytes}")
            time.sleep(0.1)
        out.seek(0)
        text = out.read()
    if process.returncode:
        sys.exit(f"{' '.join(command)}\nended with code {process.returncode}:\n{text[-4000:]}")
    say(text)
    return before - least


def measure(ranks: int, steps: int, limit_bytes: int) -> dict[str, Any]:
    """One run on real ranks, read from its summary, plan and checkpoint."""
    if available_bytes() < limit_bytes + SPARE_BYTES:
        sys.exit(f"{available_bytes()} bytes are free, {limit_bytes + SPARE_BYTES} needed; lower --limit-gib")
    with tempfile.TemporaryDirectory() as folder:
        config, run_dir = Path(folder) / "gpt1b.yaml", Path(folder) / "run"
        config.write_text(CONFIG)
        settings = [
            f"train.steps={steps}", f"train.batch={ranks}", f"pipeline.micro_batches={ranks}",
            f"pipeline.memory_bytes={limit_bytes // ranks}", "pipeline.threads=1", f"run.dir={run_dir}",
        ]  # fmt: skip
        program = [sys.executable, "-m", "mpipipe.train", str(config), *settings]
        taken = guarded([".ci/launch", str(ranks), *program], limit_bytes)
        summary = json.loads((run_dir / "summary.json").read_text())
        cuts = json.loads((run_dir / "plan.json").read_text())["layout"]["cuts"]
        index = json.loads((run_dir / "checkpoint" / "model.safetensors.index.json").read_text())
    weights = int(index["metadata"]["total_size"])
    return {
        "parameters": weights // 4,
        "peak_bytes": summary["peak_bytes"],
        "predicted_peak_bytes": summary["predicted_peak_bytes"],
        "model_bytes": weights,
        "model_and_gradient_bytes": 2 * weights,
        "largest_peak_over_model_and_gradient": max(summary["peak_bytes"]) / (2 * weights),
        "machine_memory_taken_bytes": taken,
        "step_s": summary["step_s"],
        "cuts": cuts,
        "settings": {"ranks": ranks, "steps": steps},
        "machine": machine(),
    }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="peak memory per rank of a billion-parameter GPT")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit-gib", type=float, default=20.0, help="of all ranks together")
    a = parser.parse_args(argv)
    print(json.dumps(measure(a.ranks, a.steps, int(a.limit_gib * 2**30))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
