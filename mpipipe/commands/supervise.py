"""`python -m mpipipe run config.yaml ... [-- launcher ...]`: a run that goes on after failures.

    start ranks -> watch -> they end -> end what is left -> newest whole checkpoint -> start ranks ...

A process without MPI: it starts the launcher, and judges by the run folder how far the run has come. An
error that is the user's to mend, or a wish to stop, ends it; anything else is a failure, after which the run
goes on from its newest whole checkpoint, on the hosts that answer.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpipipe.cluster import hosts as known_hosts
from mpipipe.cluster.death import cause
from mpipipe.cluster.job import GRACE_S, PROGRAM, Job, remains
from mpipipe.cluster.shared import look_anew
from mpipipe.cluster.starter import SRUN, Host, Starter, starter, surroundings_for
from mpipipe.cluster.watchdog import DIAGNOSIS, FOLDER, clear, explained, sign_of_life
from mpipipe.commands import run
from mpipipe.commands.arguments import positive
from mpipipe.commands.asking import Asking
from mpipipe.config import load
from mpipipe.errors import CheckpointError, ConfigError, LaunchError, MpipipeError
from mpipipe.planner.sizes import counted
from mpipipe.report.metrics import last_step
from mpipipe.state.resume import proven_damage, read_state, survey
from mpipipe.state.rundir import FINISHED, METRICS, SUMMARY, create, forget, how_ended, make_latest, reopen

LOOK_S = 1.0  # between two looks at a run
LINGER_S = 3 * GRACE_S  # for a launcher whose ranks have left
START_S = 1800.0  # until rank 0 gives its first: MPI and a thousand imports from a slow disk included
PAUSE_S = 10.0  # between two looks: this process stood still
SILENT_S = 120.0  # at least, without a sign of life of rank 0, which gives one every few seconds
RESTARTS = 5
LONGEST_WAIT_S = 60.0
MENDABLE = "mpipipe: error: "  # how every error begins that is the user's to mend


@dataclass
class Patience:
    """How often and after how long a failed run is started again."""

    limit: int  # restarts without progress
    furthest: int = -1  # steps, over all starts
    failures: int = 0  # since then

    def failed(self, step: int) -> float | None:
        """Seconds to wait before the next start; None: no more. step: how far the run came.

        >>> patience = Patience(3)
        >>> [patience.failed(step) for step in (10, 10, 10, 12, 12, 12, 12)]
        [1.0, 2.0, 4.0, 1.0, 2.0, 4.0, None]
        """
        if step > self.furthest:
            self.furthest, self.failures = step, 0
        self.failures += 1
        return None if self.failures > self.limit else min(2.0 ** (self.failures - 1), LONGEST_WAIT_S)


def main(argv: Sequence[str]) -> int:
    """The exit code of the run."""
    with Asking() as asking:
        return _main(argv, asking)


def _main(argv: Sequence[str], asking: Asking) -> int:
    words, launcher = list(argv), []
    if "--" in words:
        at = words.index("--")
        words, launcher = words[:at], words[at + 1 :]
    options, code = _parser().parse_intermixed_args(words), 0

    def supervise() -> None:
        nonlocal code
        code = Supervisor(options, starter(launcher, os.environ), os.environ, asking).run()

    return run(supervise) or code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpipipe run",
        usage="%(prog)s config.yaml [key=value ...] [options] [-- LAUNCHER ...]",
        description="Trains as mpipipe.train does, and goes on from the newest checkpoint after a failure, "
        "on the hosts that answer. Start it without mpirun. LAUNCHER: mpirun or srun with options of yours; "
        "else the mpirun that belongs to this Python.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("config")
    add("keys", nargs="*", metavar="key=value", help="any key of the config")
    add(
        "-n",
        type=positive,
        metavar="N",
        help="ranks; without it the tasks of the Slurm job, or 1 on each host",
    )
    add(
        "--hosts",
        metavar="A,B",
        help="hosts, or A:4,B:4 with ranks on each; without it those of the Slurm job",
    )
    add(
        "--restarts", type=positive, default=RESTARTS, metavar="N",
        help="restarts in a row that come no step further (default %(default)s)",
    )  # fmt: skip
    add("--spares", type=positive, metavar="N", help="of the ranks, in reserve: run.spares=N")
    add("--resume", action="store_true", help="as of mpipipe.train; a restart always does")
    add("--new-numerics", action="store_true", help="as of mpipipe.train")
    add("--plan", metavar="FILE", help="as of mpipipe.train; not on another number of ranks")
    return parser


class Supervisor:
    """One run, over all its starts. Raises ConfigError, LaunchError."""

    def __init__(
        self, options: argparse.Namespace, starter: Starter, environ: Mapping[str, str], asking: Asking
    ) -> None:
        self.options, self.starter, self.asking = options, starter, asking
        self.environ = surroundings_for(starter, environ)
        self.patience = Patience(options.restarts)
        if options.spares:
            options.keys.append(f"run.spares={options.spares}")
        self.config = load(options.config, options.keys)
        self.all_hosts, self.all_ranks = self._places()  # which may be wrong: before there is a folder
        here = reopen(self.config) if options.resume else None
        self.run_dir = (here or create(self.config)).absolute()
        self.names_folder, self.named = self.config.run.dir is None and here is None, False
        # a launcher knows the hosts of its Slurm job by itself, as long as all of them are there
        self.hosts, self.ranks = self.all_hosts if options.hosts else None, self.all_ranks
        self.began_at = _saved(self.run_dir)
        self.saved = self.began_at or 0
        self.summary_before = self._summary()

    def _places(self) -> tuple[list[Host] | None, int | None]:
        """The hosts and the number of ranks; None is what the launcher knows by itself."""
        tasks = self.environ.get("SLURM_NTASKS", "")
        ranks: int | None = self.options.n or (int(tasks) if tasks.isdigit() else None)
        if self.options.hosts:
            hosts: list[Host] | None = known_hosts.parse(self.options.hosts, ranks)
        else:
            hosts = known_hosts.of_slurm(self.environ, ranks)
        if ranks is None and not self.starter.given:
            ranks = sum(host.slots for host in hosts) if hosts else 1
        return hosts, ranks

    # -- the starts ----------------------------------------------------------------------------

    def run(self) -> int:
        """The exit code of the run."""
        try:
            return self._run()
        except MpipipeError as error:
            self._forget(str(error))
            raise

    def _forget(self, said: str = "") -> None:
        """The run folder, where all starts were in vain and none has named it."""
        if self.names_folder and not self.named:
            forget(self.run_dir, said)

    def _run(self) -> int:
        self._check_alone()
        if self.options.resume and how_ended(self.config, self.run_dir) == "finished":
            _say(f"{self.run_dir}: {FINISHED}")
            return 0
        if self.asking.asked:
            raise LaunchError(
                f"{self.asking.asked[0]} asked to stop before the training began; start it again, in a job "
                "of Slurm with more time (sbatch -t)"
            )
        again = False
        while True:
            code, why, mendable = self._once(again)
            if self._ended():  # its summary comes last: whatever was after it, it is done
                return 0
            if self.asking.asked or mendable:
                self._forget()
                return code
            about_hosts = self._look_for_hosts()
            if (saved := _saved(self.run_dir)) is None:
                saved = self.saved
            self.saved, step = saved, max(_told(self.run_dir), saved)
            wait_s, done = self.patience.failed(step), counted(step, "step")
            if wait_s is None:
                tried = counted(self.patience.limit, "restart")
                _say(f"{why}, after {done}; {tried} came no step further, so this is the end: {self.run_dir}")
                return code or 1  # a launcher that has lost a node may end with 0
            _say(
                f"{why}, after {done}; goes on from step {saved} in {wait_s:.0f} s, "
                f"{counted(step - saved, 'step')} lost (restart {self.patience.failures} of "
                f"{self.patience.limit} without progress)"
            )
            if about_hosts:
                _say(about_hosts)
            self.asking.wake.wait(wait_s)
            if self.asking.asked:
                return code
            again = True

    def _check_alone(self) -> None:
        """Two runs in one folder would write over one another; raises LaunchError where ranks are there."""
        if pids := " ".join(map(str, remains(self._mark))):
            raise LaunchError(
                f"{self.run_dir}: an earlier start of this run is still going on, as the processes {pids}; "
                f"wait for its end, or end it: kill {pids}"
            )

    def _once(self, again: bool) -> tuple[int, str, bool]:
        """One start, until nothing of it is left here: exit code, who died, and whether an error was said
        that is the user's to mend."""
        clear(self.run_dir)
        outlive = self.config.run.recover == "mpi"
        line = self.starter.line(self.ranks, self.hosts, self._program(again), outlive)
        shown = shlex.join([*line[: line.index(sys.executable)], "python", "-m", PROGRAM])
        _say(f"{'starts again' if again else 'starts'}: {shown} ...; run folder {self.run_dir}")
        try:
            self.asking.job = job = Job(line, self.environ, self._mark, (MENDABLE, str(self.run_dir)))
        except OSError as error:
            raise LaunchError(
                f"{line[0]}: cannot be started ({error.strerror}); name another launcher behind --"
            ) from error
        if self.asking.asked:  # meanwhile
            job.signal(signal.SIGTERM)
        try:
            code = self._watch(job)
        finally:
            self.asking.job = None
            job.end()
            self.named |= str(self.run_dir) in job.heard
        why, mendable = explained(self.run_dir), MENDABLE in job.heard
        if isinstance(code, str):
            return 128 + signal.SIGKILL, f"{why or code}; the launcher did not return", mendable
        why = why or cause(code, job.said, self.starter.family)
        return code if code >= 0 else 128 - code, why, mendable

    def _watch(self, job: Job) -> int | str:
        """The launcher's exit code; of one that is there though its ranks are not, what became of them."""
        linked, sign_at, left_at = self.config.run.dir is not None, 0.0, math.inf
        sign: Hashable = None
        limit = self.config.run.watchdog
        may_wait, begun, started_at = limit == "off" or self._queued(), False, time.monotonic()
        silent_s = max(SILENT_S, limit) if isinstance(limit, float | int) else SILENT_S
        looked_at = started_at
        while (code := job.wait(LOOK_S)) is None:
            now = time.monotonic()
            if now - looked_at > PAUSE_S:  # the whole job was, as by `scontrol suspend`
                sign_at, left_at, started_at = (at + now - looked_at for at in (sign_at, left_at, started_at))
            looked_at = now
            if not linked and os.path.exists(self.run_dir / METRICS):
                linked = self._linked()
            found = _sign_of_life(self.run_dir)
            if found is None or found != sign:
                sign, sign_at = found, now
            begun |= found is not None
            if not (begun or may_wait) and now - started_at > START_S:
                return f"no rank has begun within {START_S:.0f} s: look at network, nodes and disk"
            look_anew(self.run_dir / FOLDER)
            if os.path.exists(self.run_dir / FOLDER / DIAGNOSIS) or self._ended():
                left_at = min(left_at, now)
            if now - sign_at > silent_s or now - left_at > LINGER_S:
                return "no rank is there"
        return code

    def _linked(self) -> bool:
        try:
            make_latest(self.config, self.run_dir)
        except ConfigError as error:
            if error.kind != "failed":
                raise
            return False
        return True

    def _queued(self) -> bool:
        """Whether the launcher itself may wait for its nodes, for days."""
        return self.starter.family == SRUN and "SLURM_JOB_ID" not in self.environ

    def _program(self, again: bool) -> list[str]:
        o = self.options
        flags = ["--resume"] if again or o.resume else []
        saved = _saved(self.run_dir) if o.new_numerics else None
        if o.new_numerics and (saved is None or self.began_at in (None, saved)):  # else a checkpoint has them
            flags.append("--new-numerics")
        if o.plan and self.ranks == self.all_ranks:
            flags += ["--plan", o.plan]
        fewer, spares = [], self.config.run.spares
        before = self.all_ranks or sum(host.slots for host in self.all_hosts or ())
        if spares and self.ranks is not None and self.ranks < before:  # spares replace what is missing
            fewer = [f"run.spares={max(0, spares - (before - self.ranks))}"]
        return [sys.executable, "-m", PROGRAM, o.config, *o.keys, *fewer, self._mark, *flags]

    @property
    def _mark(self) -> str:
        return f"run.dir={self.run_dir}"

    def _ended(self) -> bool:
        """Whether the run has written its summary; one that goes on removes that of where it stopped."""
        return self._summary() not in (0, self.summary_before)

    def _summary(self) -> int:
        """Another number for each that is written; 0: there is none."""
        look_anew(self.run_dir)
        try:
            return (self.run_dir / SUMMARY).stat().st_mtime_ns
        except OSError:
            return 0

    # -- what is left --------------------------------------------------------------------------

    def _look_for_hosts(self) -> str:
        """Ends what is left on each host, and takes those that answer, also those that are back; what is to
        be said of the others."""
        if self.all_hosts is None:
            return ""
        down = known_hosts.down(self.all_hosts) if "SLURM_JOB_ID" in self.environ else set()
        tried = [host for host in self.all_hosts if host.name not in down]
        clean = [sys.executable, "-m", "mpipipe.cluster.job", self._mark]
        there = known_hosts.answering(tried, self.starter, clean, self.environ)
        gone = [host.name for host in self.all_hosts if there and host not in there]
        if not gone:
            self.hosts, self.ranks = self.all_hosts if self.options.hosts else None, self.all_ranks
            return "" if there else "no host answers; all of them are tried again"
        slots = sum(host.slots for host in there)
        self.hosts, self.ranks = there, min(self.all_ranks or slots, slots)
        return f"{', '.join(gone)}: no answer; goes on with {counted(self.ranks, 'rank')} on the other hosts"


# A file system that fails for a moment is no reason to end a run that goes on, or to start it no more. So
# `os.path.exists` is asked, too: `Path.exists` raises where it cannot be told.


def _saved(run_dir: Path) -> int | None:
    """The step of the newest whole checkpoint; None where that cannot be told just now."""
    try:
        whole = (folder for folder, wrong in survey(run_dir, look=proven_damage) if not wrong)
        folder = next(whole, None)
        return 0 if folder is None else read_state(folder).step
    except (OSError, CheckpointError):
        return None


def _told(run_dir: Path) -> int:
    """The step of the last line of metrics."""
    try:
        return last_step(run_dir / METRICS)
    except OSError:
        return 0


def _sign_of_life(run_dir: Path) -> Hashable:
    try:
        return sign_of_life(run_dir / FOLDER, 0)
    except OSError:
        return None


def _say(text: str) -> None:
    print(f"mpipipe run: {text}", flush=True)
