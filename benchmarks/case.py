"""One model of the benchmark: runs of ours and of every peer on it, each in fresh processes."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import config_of, run, steps_of, train
from benchmarks.results import Run
from benchmarks.turns import apart

KEPT = ("step_s", "peak_bytes", "predicted_step_s", "predicted_peak_bytes", "bubble", "predicted_bubble")


@dataclass(frozen=True)
class Case:
    """folder: for what is prepared once; gate: where runs wait for their turns. Every side gets the same
    overrides of the example, ours also `of_ours`."""

    model: str
    ranks: int
    gemm: str
    folder: Path
    timeout_s: float
    gate: str = ""
    keeps: bool = False  # of peers: glibc keeps what they free
    of_ours: tuple[str, ...] = ()

    def prepare(self) -> dict[str, Any]:
        """What `benchmarks/peers/prepare.py` finds out."""
        return self._peers("prepare", 1)

    def ours(self, steps: int, keys: Sequence[str] = ()) -> Run:
        """`python -m mpipipe.train`, read from its run folder. Ends the program if it fails. keys: more
        overrides of ours."""
        with tempfile.TemporaryDirectory() as temporary:
            run_dir = Path(temporary) / "run"
            overrides = [*self._overrides(steps), *self.of_ours, *keys, f"run.dir={run_dir}"]
            train(self.ranks, config_of(self.model), *overrides, timeout_s=self.timeout_s, gate=self.gate)
            summary = json.loads((run_dir / "summary.json").read_text())
            plan = json.loads((run_dir / "plan.json").read_text())
            steps = steps_of(run_dir)
        figures = {key: summary[key] for key in KEPT} | {"cuts": plan["layout"]["cuts"]}
        return figures | {"losses": [s["loss"] for s in steps], "steps_s": [s["step_s"] for s in steps]}

    def apart(self, steps: int, keys: Sequence[str] = ()) -> Run:
        """What ours could do at most: as many processes as it has ranks, that know nothing of each other."""
        one = replace(self, ranks=1)
        runs = apart(self.ranks, lambda: one.ours(steps, keys))
        steps_s = runs[0]["steps_s"]
        peaks = [max(run["peak_bytes"]) for run in runs]
        found = {"step_s": statistics.median(steps_s), "steps_s": steps_s, "peak_bytes": peaks}
        return found | {"losses": runs[0]["losses"]}

    def peer(self, side: str, choice: str, steps: int) -> Run:
        """With a setting of its own; of a run that fails, the reason."""
        return self._peers(side, steps, "--choice", choice)

    def _peers(self, side: str, steps: int, *more: str) -> dict[str, Any]:
        where = ["--folder", str(self.folder), "--ranks", str(self.ranks), "--timeout", str(self.timeout_s)]
        keep = ["--keep"] if self.keeps else []
        arguments = [side, config_of(self.model), *self._overrides(steps), *where, *keep, *more]
        text = run([sys.executable, "-m", "benchmarks.peers", *arguments], gate=self.gate)
        found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
        return found

    def _overrides(self, steps: int) -> Sequence[str]:
        same = "train.min_lr_ratio=1"  # after the warm-up, whatever the number of steps
        return f"train.steps={steps}", same, f"kernels.gemm={self.gemm}", "pipeline.threads=1"
