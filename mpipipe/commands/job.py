"""The run of a batch job: its folder, and whether this start goes on with it.

A job that is started again, by Slurm or by a person, goes on from its newest checkpoint; so the folder must
be the same each time: `run.dir`, or one that is named after the job.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpipipe.cluster.ending import TIME_OF_JOB
from mpipipe.config import Config, load
from mpipipe.errors import ConfigError
from mpipipe.state.resume import newest, read_state
from mpipipe.state.rundir import CONFIG, METRICS, how_ended, reopen

AGAIN = "SIGUSR1", TIME_OF_JOB  # of `Report.stopped_by`: who stops a run so wants it to be started again


@dataclass(frozen=True)
class JobRun:
    config: Config
    folder: Path
    resume: bool
    arguments: tuple[str, ...]  # of train

    @property
    def threads(self) -> int | None:
        """Of the newest checkpoint that this start goes on from: they decide the bits."""
        checkpoint = newest(self.folder) if self.resume else None
        return None if checkpoint is None else read_state(checkpoint).numerics.threads

    @property
    def ended(self) -> str:
        """As `how_ended`."""
        return how_ended(self.config, self.folder)

    def is_to_go_on(self, asked: bool = False) -> bool:
        """Whether the job is to be started again, as its time was over before the run was. asked: to stop, or
        preempted; ranks that were just beginning, or being started again, may have died of it."""
        if asked and self.ended in ("", "SIGTERM"):
            return newest(self.folder) is not None
        return self.ended in AGAIN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of train."""
    parser.add_argument("config", help="the YAML file of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="any key of the config")
    parser.add_argument(
        "--resume", action="store_true", help="as train has it; a job that starts again resumes by itself"
    )
    parser.add_argument("--new-numerics", action="store_true", help="as train has it")
    parser.add_argument("--plan", metavar="FILE", help="as train has it")


def run_of_job(a: argparse.Namespace, environ: Mapping[str, str]) -> JobRun:
    """It goes on where it was asked to, where Slurm has started the job again, and where its folder holds a
    run of the same config. Raises ConfigError."""
    overrides = list(a.overrides)
    config = load(a.config, overrides)
    if config.run.dir is None and a.resume and environ.get("SLURM_JOB_ID"):
        raise ConfigError(
            "--resume in a Slurm job, and run.dir is null: runs/latest may be another run each time that the "
            "job starts; give run.dir=FOLDER, that of the run to go on with"
        )
    if config.run.dir is None and not a.resume:
        overrides.append(f"run.dir=runs/slurm-{environ.get('SLURM_JOB_ID', '0')}")
        config = load(a.config, overrides)
    folder = Path(config.run.dir) if config.run.dir is not None else reopen(config) or Path("runs/latest")
    resume = a.resume or _began(config, folder, again=environ.get("SLURM_RESTART_COUNT", "0") != "0")
    flags = [*(["--resume"] if resume else []), *(["--new-numerics"] if a.new_numerics else [])]
    plan = ["--plan", a.plan] if a.plan else []
    return JobRun(config, folder, resume, (a.config, *overrides, *flags, *plan))


def _began(config: Config, folder: Path, again: bool) -> bool:
    if again:
        return (folder / CONFIG).is_file()
    if not (folder / METRICS).exists():  # then config.yaml may be the user's own
        return False
    try:
        return _asked(load(folder / CONFIG)) == _asked(config)
    except ConfigError:  # there is none, or that of another version
        return False


def _asked(config: Config) -> Config:
    """Without the keys that the supervisor sets: where the folder is, and the spares that are left."""
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": None, "spares": 0})})
