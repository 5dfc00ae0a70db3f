"""What a run was predicted to take, and what it took: one JSON line for each model and number of ranks.

    python -m benchmarks.prediction [--models gpt10m,...] [--rounds 3] [--ranks 1,2,4]
        [--schedule 1f1b] [--bits fast] [--start] [--tensors]

Each round is the real command line in fresh processes, without costs of earlier runs (--cached: with them).
Figures are medians over rounds; ratio = measured / predicted; step_error: by what part of the measured step
the predicted one is off, with what is aimed at (`bar`, `met`). For each rank and kind of instruction of each
of its stages:

    wall     seconds, which others on the machine lengthen
    on core  seconds that the instruction had a core: predicted times of computing should be these

--start adds where the time from the launch to the first step goes. --tensors adds the most bytes of live
storages in one step, by torch's profiler, which makes that step longer. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import mpipipe.graph.variants
import mpipipe.measuring
import mpipipe.pipeline
import mpipipe.running
import mpipipe.runtime.feed
import mpipipe.runtime.trainer
import mpipipe.train
from benchmarks.bars import at_most
from benchmarks.common import AS_PLANNED, config_of, launch, machine, say
from mpipipe.cluster.mpi import connect
from mpipipe.config import load
from mpipipe.planner.prediction import tensor_peak_bytes
from mpipipe.planner.programs import cut_indices, program_for
from mpipipe.planner.sizes import counted
from mpipipe.planner.stages import in_order, stage_costs
from mpipipe.runtime.interpreter import Interpreter, Job, Outcome
from mpipipe.runtime.process import imports_are_done
from mpipipe.values import COMPUTE, Instr, Op, Plan, Program, from_json

RESNET = """
model: {name: resnet, channels: 3, size: 32, blocks: [2, 2, 2], widths: [32, 64, 128]}
data: {name: synthetic, samples: 512}
train: {batch: 64, lr: 1e-3}
pipeline: {micro_batches: 8}
"""
STEPS = {"gpt": 30, "gpt10m": 8, "gpt85m": 4, "vgg": 6, "unet": 60, "resnet": 30}
BAR = 0.05  # of step_error
FIGURES = (
    "step_s", "predicted_step_s", "peak_bytes", "predicted_peak_bytes", "bubble", "predicted_bubble",
)  # fmt: skip
LOADED: list[tuple[int, int]] = []  # nanoseconds, bytes
PROFILED, PROFILED_STEP = "BENCHMARK_TENSORS", 2  # variable that ranks read; a step like those that follow
PARTS = (  # owner, function, name of the part
    (mpipipe.train, "prepare", "data"),
    (mpipipe.train, "open_dataset", "data"),
    (mpipipe.train, "build", "model"),
    (mpipipe.pipeline, "ModelSource", "model"),
    (mpipipe.graph.variants, "capture", "capture"),
    (mpipipe.measuring.Measuring, "messages", "probe of messages"),
    (mpipipe.measuring.Measuring, "gemm", "probe of products"),
    (mpipipe.measuring, "measure", "costs"),
    (mpipipe.pipeline.Pipeline, "plan_for", "plan"),
    (mpipipe.pipeline, "Trainer", "weights"),
    (mpipipe.pipeline.Pipeline, "_rehearse", "rehearsal"),
    (mpipipe.running.Run, "_make_room", "room for saves"),
)

# -- one rank --------------------------------------------------------------------------------------


class TimedInterpreter(Interpreter):
    """The product's interpreter; what its training instructions took is kept."""

    kept: list[tuple[int, str, float, float]] = []  # noqa: RUF012 - step, kind, wall, on core; one per process

    tensor_peak_bytes = 0  # of the step that is profiled; in this process

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        timed = {op: self._timed(op.name, self._handlers[op]) for op in (*COMPUTE, Op.NORM)}
        self._handlers = {**self._handlers, **timed}

    def run(self, program: Program, job: Job) -> Outcome:
        if not os.environ.get(PROFILED) or (job.mode, job.step) != ("train", PROFILED_STEP):
            return super().run(program, job)
        before, loads = live_bytes(), len(LOADED)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            outcome = super().run(program, job)
        TimedInterpreter.tensor_peak_bytes = before + most_added(found, LOADED[loads:])
        return outcome

    def _timed(self, kind: str, handler: Callable[[Instr], None]) -> Callable[[Instr], None]:
        def run(instr: Instr) -> None:
            wall, core = time.perf_counter(), time.thread_time()
            handler(instr)
            if self.job.mode == "train":
                wall, core = time.perf_counter() - wall, time.thread_time() - core
                self.kept.append((self.job.step, _name(kind, instr.stage), wall, core))

        return run


def live_bytes() -> int:
    """Of all storages in memory that a tensor of Python shows."""
    tensors = (t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors if t.device.type == "cpu" and t.layout == torch.strided
    }  # fmt: skip
    return sum(storages.values())


def most_added(found: Any, loaded: Sequence[tuple[int, int]]) -> int:
    """The most bytes of storages made since the profile began, less those given back. loaded: what the
    profiler does not see, as another thread makes it."""
    events = (e for e in found.profiler.kineto_results.events() if e.name() == "[memory]")
    changes = sorted([*((e.start_ns(), e.nbytes()) for e in events), *loaded])
    return max(0, *itertools.accumulate(nbytes for _, nbytes in changes))


def noting_loads(load: Callable[..., Any]) -> Callable[..., Any]:
    """As `load`; when and how much is kept in `LOADED`."""

    def noted(*arguments: Any) -> Any:
        batch = load(*arguments)
        LOADED.append((time.time_ns(), sum(t.nbytes for t in batch.values())))
        return batch

    return noted


class Start:
    """Seconds of the parts between the launch and the first step."""

    def __init__(self, launched: float) -> None:
        self.launched, self.parts, self.until = launched, {"launch and imports": time.time() - launched}, 0.0
        for owner, name, part in PARTS:
            setattr(owner, name, self._timed(getattr(owner, name), part))
        step = mpipipe.pipeline.Pipeline.timed_step

        def first(pipe: mpipipe.pipeline.Pipeline, *arguments: Any) -> Any:
            self.until = self.until or time.time()
            return step(pipe, *arguments)

        mpipipe.pipeline.Pipeline.timed_step = first  # type: ignore[assignment, method-assign]

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            before = time.time()
            result = function(*arguments, **named)
            if not self.until:
                self.parts[part] = self.parts.get(part, 0.0) + time.time() - before
            return result

        return run

    def found(self) -> dict[str, float]:
        whole = self.until - self.launched
        return {"whole": whole, **self.parts, "rest": whole - sum(self.parts.values())}


def rank_main(config: str, overrides: Sequence[str], out: Path, launched: float) -> None:
    """One rank of a run; rank 0 writes what all have found."""
    start = Start(launched)
    mpipipe.runtime.trainer.Interpreter = TimedInterpreter  # type: ignore[attr-defined]
    mpipipe.runtime.feed._load = noting_loads(mpipipe.runtime.feed._load)
    before = time.time()
    comm = connect()
    connected = time.time()
    imports_are_done()
    start.parts |= {"mpi": connected - before, "tracer": time.time() - connected}
    report = mpipipe.train.train(comm, load(config, [AS_PLANNED, *overrides]))
    mine = TimedInterpreter.kept, start.found(), TimedInterpreter.tensor_peak_bytes
    kept, starts, tensors = zip(*comm.allgather_object(mine), strict=True)
    if comm.rank == 0:
        found = {key: getattr(report, key) for key in FIGURES}
        more = {"kept": kept, "start": starts[0], "tensor_peak_bytes": tensors}
        out.write_text(json.dumps(found | more))
    comm.close()


# -- rounds ----------------------------------------------------------------------------------------


def one_round(config: str, overrides: Sequence[str], ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out, run_dir = Path(folder) / "out.json", Path(folder) / "run"
        arguments = [config, *overrides, f"run.dir={run_dir}", "--out", out, "--launched", time.time()]
        launch(ranks, "-m", "benchmarks.prediction", *map(str, arguments))
        found: dict[str, Any] = json.loads(out.read_text())
        plan = from_json(Plan, (run_dir / "plan.json").read_text())
        found["predicted, wall, on core"] = _instructions(plan, found.pop("kept"))
        found["predicted_tensor_peak_bytes"] = _tensors(plan)
        found["schedule"] = plan.layout.schedule
    return found


def _tensors(plan: Plan) -> list[int]:
    assert plan.costs is not None
    names = plan.costs.names
    program = program_for(plan.layout, plan.numerics, plan.costs.ties, names)
    return list(tensor_peak_bytes(plan.costs, plan.layout, program))


def _instructions(plan: Plan, kept: Sequence[Sequence[tuple[int, str, float, float]]]) -> list[Any]:
    """Per rank, kind and stage: seconds as predicted, on the wall and on a core; medians without the first
    step."""
    assert plan.costs is not None
    cuts = cut_indices(plan.layout, [g.name for g in plan.costs.groups])
    predicted = {"NORM": 0.0}
    for s, stage in enumerate(stage_costs(in_order(plan.costs, plan.layout.order), cuts)):
        predicted |= {
            f"F{s}": stage.fwd_s, f"B{s}": stage.bwd_input_s + stage.bwd_weight_s, f"I{s}": stage.bwd_input_s,
            f"W{s}": stage.bwd_weight_s + stage.split_s, f"STEP{s}": stage.step_s,
        }  # fmt: skip
    return [
        {
            name: [
                predicted[name],
                statistics.median(wall for step, of, wall, _ in rows if step and of == name),
                statistics.median(core for step, of, _, core in rows if step and of == name),
            ]
            for name in sorted({of for step, of, _, _ in rows if step})
        }
        for rows in kept
    ]


def _name(kind: str, stage: int) -> str:
    return kind if stage < 0 else f"{kind}{stage}"


def model_line(model: str, ranks: int, a: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one model on so many ranks."""
    rounds, schedules = [], []
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(model)
        if model == "resnet":
            config = str(Path(folder) / "resnet.yaml")
            Path(config).write_text(RESNET)
        overrides = [
            f"train.steps={a.steps or STEPS.get(model, 10)}", "pipeline.threads=1", f"kernels.gemm={a.gemm}",
            "eval.every=0", f"pipeline.cost_cache={str(a.cached).lower()}", f"pipeline.schedule={a.schedule}",
            f"train.bits={a.bits}",
        ]  # fmt: skip
        for i in range(a.rounds):
            load_before = os.getloadavg()[0]
            r = one_round(config, overrides, ranks)
            schedules.append(r.pop("schedule"))
            rounds.append(ratios(r) | r | {"load_before": load_before})
            text = f"predicted {r['predicted_step_s']:.4f} s, measured {r['step_s']:.4f} s a step"
            where = f"{model} on {counted(ranks, 'rank')} {schedules[-1]} round {i + 1}/{a.rounds}"
            say(f"{where}: {text} (load {load_before:.1f})")
    left_out = [] if a.start else ["start"]
    if not a.tensors:
        left_out += ["tensor_peak_bytes", "predicted_tensor_peak_bytes", "tensor_ratio"]
    found: dict[str, Any] = medians([{k: v for k, v in r.items() if k not in left_out} for r in rounds])
    return {"model": model, "ranks": ranks, "schedules": schedules, **judged(found["step_ratio"]), **found}


def judged(step_ratio: float) -> dict[str, Any]:
    """The error of a predicted step, of the measured one."""
    error = abs(1.0 / step_ratio - 1.0)
    return {"step_error": error, **at_most(error, BAR)}


def medians(rounds: Sequence[Any]) -> Any:
    """Of each number over equal structures of dictionaries and lists; of a key over those that have it, as
    another round may have another schedule."""
    if isinstance(rounds[0], dict):
        keys = dict.fromkeys(key for r in rounds for key in r)
        return {key: medians([r[key] for r in rounds if key in r]) for key in keys}
    if isinstance(rounds[0], list):
        return [medians(column) for column in zip(*rounds, strict=True)]
    return round(statistics.median(rounds), 6)


def ratios(found: dict[str, Any]) -> dict[str, Any]:
    """Measured over predicted, of one round."""
    peaks = zip(found["peak_bytes"], found["predicted_peak_bytes"], strict=True)
    tensors = zip(found["tensor_peak_bytes"], found["predicted_tensor_peak_bytes"], strict=True)
    return {
        "step_ratio": found["step_s"] / found["predicted_step_s"],
        "peak_ratio": [measured / predicted for measured, predicted in peaks],
        "tensor_ratio": [measured / predicted for measured, predicted in tensors],
    }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="predicted against measured")
    parser.add_argument("config", nargs="?", help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "--models", default=",".join(STEPS), help="names in examples/, or resnet; with commas"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", default="2", help="with commas")
    parser.add_argument(
        "--steps", type=int, help="of a run, the first is not counted; default: as fits the model"
    )
    parser.add_argument("--gemm", choices=("auto", "mkl", "onednn"), default="auto", help="as a user has it")
    parser.add_argument("--schedule", default="auto", help="pipeline.schedule")
    parser.add_argument("--bits", choices=("torch", "fast"), default="torch", help="train.bits")
    parser.add_argument("--cached", action="store_true", help="with the costs of earlier runs")
    parser.add_argument("--start", action="store_true", help="also the parts of the start")
    parser.add_argument("--tensors", action="store_true", help="also the most bytes of live storages")
    parser.add_argument("--out", help=argparse.SUPPRESS)  # given: this process is a rank
    parser.add_argument("--launched", type=float, help=argparse.SUPPRESS)
    a = parser.parse_args(argv)
    if a.steps is not None and a.steps < 2:
        parser.error(f"--steps: the first step is not counted, so there must be 2 or more, not {a.steps}")
    if a.out:
        rank_main(a.config, a.overrides, Path(a.out), a.launched)
        return
    os.environ[PROFILED] = "1" if a.tensors else ""
    for model, ranks in itertools.product(a.models.split(","), a.ranks.split(",")):
        line = model_line(model, int(ranks), a)
        print(json.dumps(line | {"machine": machine()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
