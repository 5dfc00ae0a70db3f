"""`mpirun -n N python -m mpipipe.train config.yaml [key=value ...] [--resume]`: a whole run.

    config -> model, data -> Pipeline -> steps, evaluations, checkpoints -> summary

Every rank runs this file with the same arguments. Rank 0 decides and speaks; an error on any rank
ends all.
"""

from __future__ import annotations

import gc
import os
import sys
import time

BEGAN = time.time()  # as good as the start of the process: what is imported below may take long

if __name__ == "__main__":
    gc.disable()  # until `imports_are_done`: there is much to look through, and no garbage

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from mpipipe.cluster.agree import agree, surroundings
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.ending import TimeLimit, end, leave, stop_signals
from mpipipe.cluster.launch import busy_advice, launcher_on_terminal
from mpipipe.cluster.mpi import connect
from mpipipe.cluster.node import load as load_average
from mpipipe.cluster.shared import check_seen
from mpipipe.cluster.spares import check_spares, first_working, listed
from mpipipe.cluster.started import launcher_pid
from mpipipe.cluster.survivors import check_tolerant
from mpipipe.cluster.watchdog import Watchdog, clear
from mpipipe.config import Config, load
from mpipipe.config.sections import TrainConfig
from mpipipe.configured import optimizer_settings, schedule_name
from mpipipe.data import open_dataset, prepare
from mpipipe.decided import threads_of
from mpipipe.errors import CheckpointError, MpipipeError
from mpipipe.models import build
from mpipipe.ops.native import use_kernels
from mpipipe.pipeline import Pipeline
from mpipipe.planner.sizes import counted
from mpipipe.report.metrics import cut_metrics
from mpipipe.report.perfetto import PERFETTO
from mpipipe.report.progress import Progress, Silent
from mpipipe.report.scalars import need_tensorboard
from mpipipe.report.trace import TRACE
from mpipipe.running import Run
from mpipipe.runtime.process import imports_are_done, resident_memory
from mpipipe.state.files import room_in
from mpipipe.state.owner import own
from mpipipe.state.resume import read_state, set_aside, unreadable
from mpipipe.state.rundir import (
    CONFIG,
    FINISHED,
    METRICS,
    SUMMARY,
    create,
    forget,
    make_latest,
    read_summary,
    renew,
    reopen,
)
from mpipipe.state.verify import newest_sound
from mpipipe.values import Report

USAGE = """usage: mpirun -n N python -m mpipipe.train config.yaml [key=value ...]
                     [--resume] [--new-numerics] [--plan FILE]

  key=value        any key of the config, such as train.steps=50; docs/config.md lists them all
  --resume         go on from the newest checkpoint of the run in run.dir, or of runs/latest
  --new-numerics   with --resume: also where what decides the bits (batch, seed, data, ...) has changed
  --plan FILE      use the cuts and the schedule of a plan.json, of `python -m mpipipe plan -o` or edited"""


def main(argv: Sequence[str]) -> int:
    """The exit code; on an error, ends every rank of the job with a non-zero one."""
    comm: Communicator | None = None
    try:
        plan, argv = _plan_of(argv)
        flags = {a for a in argv if a.startswith("-")}
        given = [a for a in argv if a not in flags]
        if flags & {"-h", "--help"}:
            print(USAGE)
            return 0
        if unknown := sorted(flags - {"--resume", "--new-numerics"}):
            hint = "a key of the config is set as section.key=value, such as train.steps=50"
            raise MpipipeError(f"{unknown[0]} is no option; {hint}\n{USAGE}")
        if not given:
            raise MpipipeError(f"no config is named\n{USAGE}")
        comm = connect()
        config = load(given[0], given[1:])
        imports_are_done()
        with stop_signals(comm.rank == 0) as asked:  # to the very end: a late one must not kill the save
            train(comm, config, "--resume" in flags, "--new-numerics" in flags, plan, asked, BEGAN)
        leave(comm)
        return 0
    except BaseException as error:
        return end(comm, error)


def _plan_of(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file after --plan, and the other arguments."""
    rest = [word for a in argv for word in (a.split("=", 1) if a.startswith("--plan=") else [a])]
    if "--plan" not in rest:
        return None, rest
    at = rest.index("--plan")
    if at + 1 == len(rest):
        raise MpipipeError("--plan needs a file: --plan plan.json")
    return rest[at + 1], rest[:at] + rest[at + 2 :]


def train(
    comm: Communicator,
    config: Config,
    resume: bool = False,
    new_numerics: bool = False,
    plan: str | None = None,
    asked: list[str] | None = None,
    began: float | None = None,
) -> Report:
    """Trains as configured; the report is the same on every rank. A run that is finished is left as it is.
    Collective.

    resume: goes on from the newest whole checkpoint of the run in `run.dir`, or of the latest run.
    plan: the file of a plan whose layout is used. asked: reasons to stop: where there is one, the run ends
    after its step. began: the second since the epoch from which `run.time_limit` counts; None = now.
    """
    limit = TimeLimit(config.run.time_limit, os.environ, began=began)
    settings = {**config.model_dump(), "command": {"--resume": resume, "--new-numerics": new_numerics}}
    given = {f"{s}.{k}": repr(v) for s, keys in settings.items() for k, v in keys.items()}
    agree(comm, surroundings() | given)
    check_spares(config.run.spares, comm.size, config.run.recover)
    if config.run.recover == "mpi":
        check_tolerant(comm)
    use_kernels(config.kernels.compiled)
    resident_memory()  # from here on it counts
    place = comm.bcast_object(_place(config, resume) if comm.rank == 0 else None)
    assert place is not None
    run_dir, _, there = place
    try:
        check_seen(comm, run_dir / CONFIG)
        if comm.rank == 0:
            clear(run_dir)
        comm.barrier()
        sees = Watchdog(comm.rank, comm.size, run_dir, config.run.watchdog)
        with room_in(run_dir), closing(sees) as watchdog:
            watchdog.start()
            asked = [] if asked is None else asked
            return _train(comm, config, place, new_numerics, plan, asked, watchdog, limit)
    except BaseException as error:
        if comm.rank == 0 and config.run.dir is None and not there:
            forget(run_dir, error)
        raise


def _train(
    comm: Communicator, config: Config, place: tuple[Path, list[str], bool], new_numerics: bool,
    plan: str | None, asked: list[str], watchdog: Watchdog, limit: TimeLimit,
) -> Report:  # fmt: skip
    """As `train`, in the run folder that there is. place: as `_place` gives it."""
    run_dir, said, resumed = place
    schedule = schedule_name(config)  # what it names is looked for before the data and the model
    checkpoint, passed_over = newest_sound(comm, run_dir) if resumed else (None, [])
    changed = list[str]()  # said when the resume is not refused
    of_run = list[dict[str, Any]]()
    if resumed:
        done = comm.bcast_object(_finished(config, run_dir, checkpoint) if comm.rank == 0 else None)
        if done is not None:
            return done
        said, changed, of_run = comm.bcast_object(
            _going_on(config, run_dir, checkpoint, passed_over) if comm.rank == 0 else ([], [], [])
        )
    prepare(config, run_dir, comm.rank == 0, of_run)
    comm.barrier()
    opened = open_dataset(config, run_dir)
    data, val = opened if isinstance(opened, tuple) else (opened, None)
    built = build(config, data)
    with _progress(comm, config, run_dir) as log:
        for line in said:
            log.say(line)
        c, t, p = config, config.train, config.pipeline
        kept = None if checkpoint is None else read_state(checkpoint)
        # by the checkpoint, as config.yaml is of the newest start, which may have made none
        new_data = kept is not None and kept.config.get("data") != config.model_dump(mode="json")["data"]
        threads = threads_of(comm, p.threads, kept, c.run.spares)
        for line in beginning(comm, config, threads, run_dir, 0 if kept is None else kept.step):
            log.say(line)
        for note in built.notes:
            log.say(f"note: {note}")
        pipe = Pipeline(
            built.model, built.loss, built.data, optimizer_settings(config), batch=t.batch, val=val,
            val_batch=c.eval_batch, micro_batches=p.micro_batches, metrics=built.metrics,
            schedule=schedule, precision=t.precision, threads=threads, bind=p.bind,
            blocks=p.blocks, max_ranks=p.max_ranks, replicas=p.replicas, reduce=p.reduce, tied=p.tied,
            bits=t.bits, gemm=c.kernels.gemm, kernels=c.kernels.compiled, seed=t.seed, unused=t.unused,
            max_shapes=c.capture.max_shapes, receive_window=p.receive_window,
            device=p.device, memory_bytes=p.memory_bytes, recompute=p.recompute, cost_cache=p.cost_cache,
            recover=c.run.recover, mirror_every=c.run.mirror_every, spares=c.run.spares,
            refine=c.run.refine, initial=built.initial, resume=checkpoint, new_numerics=new_numerics,
            new_data=new_data, plan=plan, comm=comm, say=log.say,
        )  # fmt: skip
        for line in changed:
            log.say(line)
        owner = None
        if comm.rank == 0:
            set_aside(passed_over)
            owner = own(run_dir, pipe.steps_done)
        if resumed and comm.rank == 0:
            renew(run_dir, config, pipe.steps_done)
            of_its_end = [run_dir / name for name in (SUMMARY, TRACE, "timeline.png", PERFETTO)]
            for path in (*of_its_end, *run_dir.glob("*.part")):  # and what it could not end
                path.unlink(missing_ok=True)
            cut_metrics(run_dir / METRICS, pipe.steps_done)
        if comm.rank == 0:
            make_latest(config, run_dir)
        with closing(Run(config, pipe, built, run_dir, log, watchdog, owner, limit)) as run:
            return run.all(asked)


def _place(config: Config, resume: bool) -> tuple[Path, list[str], bool]:
    """(run folder, what to say of it, whether it was there); on one rank."""
    if config.run.tensorboard:
        need_tensorboard()
    run_dir = reopen(config) if resume else None
    if run_dir is not None:
        return run_dir, [], True
    there = config.run.dir or "runs"
    said = [f"note: there is no run to resume in {there}, a new one begins"] if resume else []
    return create(config), said, False


def _finished(config: Config, run_dir: Path, checkpoint: Path | None) -> Report | None:
    """What a run that has nothing left to do came to, which is said; on one rank. A chain of jobs starts it
    again all the same. Without its newest checkpoint it is not finished."""
    if checkpoint is None or (report := read_summary(run_dir)) is None:
        return None
    steps = config.train.steps
    if report.steps < steps or read_state(checkpoint).step < steps:
        return None
    print(f"mpipipe: {run_dir}: {counted(report.steps, 'step')}: {FINISHED} (now {steps})", flush=True)
    return report


def _going_on(
    config: Config, run_dir: Path, checkpoint: Path | None, passed_over: Sequence[tuple[Path, str]]
) -> tuple[list[str], list[str], list[dict[str, Any]]]:
    """(what to say of a run that goes on, and of its settings, the sections `data` that it has gone by); on
    one rank."""
    if checkpoint is None and (unread := unreadable(passed_over)):
        raise CheckpointError(
            "\n".join([f"{run_dir}: no checkpoint can be read", *(f"  {wrong}" for _, wrong in unread)])
            + "\n  mend one, or start anew in another folder"
        )
    state, steps = None if checkpoint is None else read_state(checkpoint), config.train.steps
    step = 0 if state is None else state.step
    before = load(run_dir / CONFIG) if step else config
    of_run = list[dict[str, Any]]()
    if state is not None and step:  # config.yaml is of the newest start, which may have made no checkpoint
        kept = before.model_dump(mode="json")["data"], state.config.get("data")
        of_run = [data for data in kept if data is not None]
    going_on = (
        f"resuming {run_dir} after {step} steps" if step else f"no checkpoint in {run_dir}, it begins anew"
    )
    if step >= steps:
        going_on += f", which are all: {SUMMARY} is not there, or of another version"
    notes = [f"note: passed over {folder}: {wrong}" for folder, wrong in passed_over]
    return [*notes, f"mpipipe: {going_on}"], otherwise(before, config), of_run


def otherwise(before: Config, now: Config) -> list[str]:
    """What to say of settings with which a run goes on as it would not have without them."""
    names = [name for name in TrainConfig.model_fields if name not in ("save_every", "keep", "keep_every")]
    pairs = [("model.name", before.model.name, now.model.name)]
    pairs += [(f"train.{name}", getattr(before.train, name), getattr(now.train, name)) for name in names]
    changed = ", ".join(f"{name} = {b}, was {a}" for name, a, b in pairs if a != b)
    if not changed:
        return []
    rate = "; the rate falls to its end at the last step" if before.train.steps != now.train.steps else ""
    return [f"note: trained otherwise from here on: {changed}{rate}"]


def beginning(comm: Communicator, config: Config, threads: int, run_dir: Path, step: int) -> list[str]:
    """What is said before the first thing that takes long. step: that of the checkpoint from which it goes
    on, from which another start does, too."""
    advice, every = busy_advice(comm, load_average()), config.train.save_every
    place = f"step {step}" if step else "the beginning"
    if every:
        place = f"the newest checkpoint, at most {counted(every, 'step')} back"
    recovery = (
        f"recovery: a run that dies begins again from {place} (train.save_every={every}); `python -m mpipipe "
        "run` starts it by itself"
    )
    working = first_working(comm.node_of_rank, config.run.spares)
    spares = [rank for rank in range(comm.size) if rank not in working]
    if config.run.recover == "mpi":
        by = "by spares while there are some, then " if spares else ""
        recovery = f"recovery: in this job, {by}on the ranks that are left, from their mirrors"
    in_job = "SLURM_JOB_ID" in os.environ  # where USR1 means: save, and start again (slurm/train.sh)
    if not in_job and (launcher := launcher_pid()):
        recovery += f"; `kill -USR1 {launcher}` stops it with a checkpoint"
    ranks = counted(len(working), "rank") + (f" and {listed(spares)}" if spares else "")
    return [
        f"mpipipe: {ranks} x {counted(threads, 'thread')}, run folder {run_dir}",
        *([f"note: {advice}"] if advice else []),
        *([recovery] if comm.size > 1 else []),
        f"{config.model.name}: it is captured, then what its parts cost here is measured ...",
    ]


def _progress(comm: Communicator, config: Config, run_dir: Path) -> Progress | Silent:
    if comm.rank != 0:
        return Silent()
    bar = launcher_on_terminal()
    return Progress(config.train.steps, config.run.log_every, run_dir / "train.log", bar=bar)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
