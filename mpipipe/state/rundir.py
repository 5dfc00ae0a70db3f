"""The run folder: everything a run leaves behind.

runs/20261121-004717-gpt/   config.yaml plan.json metrics.jsonl train.log summary.json checkpoints/ ...
runs/latest -> 20261121-004717-gpt
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from mpipipe.cluster.watchdog import FOLDER as FLIGHT
from mpipipe.config import Config, load, to_yaml
from mpipipe.errors import ConfigError
from mpipipe.state.files import kind_of, link_whole, write_text
from mpipipe.values import Report, Value, from_json, to_json

CONFIG = "config.yaml"
SUMMARY = "summary.json"  # its existence says that the run has ended
METRICS = "metrics.jsonl"  # its existence says that training began
SAVES = "saves.json"
FINISHED = "the run is finished; for more, raise train.steps"
_OF_ANY_START = (
    *(CONFIG, "train.log", "corpus-*.bin", "source-*/corpus-*.bin"),
    *("flight/rank-*.alive", "flight/rank-*.stack"),
)


def create(config: Config, base: str | Path = "runs", now: datetime | None = None) -> Path:
    """Makes the folder of a new run, on one rank only, with the resolved configuration in it:
    `run.dir`, or `base`/<UTC time>-<name>. Raises ConfigError."""
    try:
        given = config.run.dir
        folder = claim_new(config, base, now) if given is None else _claim(Path(given))
        write_text(folder / CONFIG, to_yaml(config))
    except OSError as error:
        raise ConfigError(
            f"run.dir: cannot make {error.filename or config.run.dir or base} ({error.strerror}); name a "
            "folder of yours, with room"
        ) from error
    return folder


def forget(folder: Path, error: BaseException | str = "") -> None:
    """Removes the folder of a start that has failed, one that `create` has named. It stays where there is
    more in it than any start leaves before it plans, and where the error names it: a user may look there.
    What cannot be removed stays with the configuration, by which a folder is known as that of a run."""
    if str(folder) in str(error):
        return
    _forget(folder)
    for pause_s in (0.1, 0.5):  # another rank may just have written a file of it
        if folder.exists() and _is_start(folder):
            time.sleep(pause_s)
            _forget(folder)


def _is_start(folder: Path) -> bool:
    """Whether there is no more in it than any start leaves before it plans."""
    found = [  # by a walk, which does not mind that another rank removes its files meanwhile
        (Path(at) / name).relative_to(folder).as_posix() for at, _, names in os.walk(folder) for name in names
    ]
    return all(any(fnmatchcase(f, p) for p in _OF_ANY_START) for f in found)


def _forget(folder: Path) -> None:
    if _is_start(folder):
        with suppress(OSError):
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)  # NFS keeps files that other ranks have open
                elif path.name != CONFIG:
                    path.unlink(missing_ok=True)
            if all(path.name == CONFIG for path in folder.iterdir()):
                shutil.rmtree(folder)


def make_latest(config: Config, folder: Path) -> None:
    """Points `latest`, beside a folder that `create` has named, at it: when training begins, so that a start
    that fails hides no run. Raises ConfigError."""
    if config.run.dir is None:
        try:
            link_whole(folder.parent / "latest", folder.name)
        except OSError as error:
            raise ConfigError(
                f"{folder.parent}/latest: cannot be made ({error.strerror})", kind=kind_of(error)
            ) from error


def reopen(config: Config, base: str | Path = "runs") -> Path | None:
    """The folder of the run to continue: `run.dir`, or the one that `base`/latest points at; None when no
    run has begun there. Changes nothing. Raises ConfigError where the latest is of another model: run after
    run, somebody else's would be taken for finished."""
    if config.run.dir is not None:
        folder = Path(config.run.dir)
    else:
        latest = Path(base) / "latest"
        folder = latest.parent / latest.readlink() if latest.is_symlink() else latest
    if not (folder / CONFIG).is_file():
        return None
    if config.run.dir is None:
        _check_model(config, folder)
    return folder


def _check_model(config: Config, folder: Path) -> None:
    model = _model_of(folder)
    if model not in (None, config.model.name):  # None: what resumes it tells
        ours = (path for path in sorted(folder.parent.iterdir(), reverse=True) if not path.is_symlink())
        newest = next((path for path in ours if _model_of(path) == config.model.name), None)
        raise ConfigError(
            f"run.dir is null, and the latest run, {folder}, is one of the model {model}, not of "
            f"{config.model.name}: name the run to resume, {f'run.dir={newest}, ' if newest else ''}or "
            f"run.dir={folder} if it is that one all the same"
        )


def _model_of(folder: Path) -> str | None:
    """None where there is no run, or one of another version."""
    try:
        return load(folder / CONFIG).model.name
    except ConfigError:
        return None


def is_run(folders: Collection[str], files: Collection[str]) -> bool:
    """Whether a folder with these in it is that of a run that has begun."""
    return CONFIG in files and (FLIGHT in folders or METRICS in files or SUMMARY in files)


def how_ended(config: Config, folder: Path) -> str:
    """ "finished", or why a run stopped before its end; "" where it has not got so far, as after a start that
    died before its summary, or where it is to do more steps now."""
    if (report := read_summary(folder)) is None:
        return ""
    return "finished" if report.steps >= config.train.steps else report.stopped_by or ""


def read_summary(folder: Path) -> Report | None:
    """None where there is none, or one of another version."""
    try:
        return from_json(Report, (folder / SUMMARY).read_bytes())
    except (OSError, ValidationError):
        return None


def renew(folder: Path, config: Config, step: int) -> None:
    """Makes `config` the settings of a run that goes on after `step` steps, on one rank only. Earlier
    settings stay as config.before-step-<step>.yaml where they differ. Raises ConfigError."""
    path, kept = folder / CONFIG, folder / f"config.before-step-{step}.yaml"
    try:
        before, now = path.read_text(encoding="utf-8"), to_yaml(config)
        if before == now:
            return
        if not kept.exists():  # else no checkpoint was made under the settings of a run resumed here before
            write_text(kept, before)
        write_text(path, now)
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: cannot be written ({error.strerror}); resume as the run's owner",
            kind=kind_of(error),
        ) from error


@dataclass(frozen=True)
class Saves(Value):
    """Of the last start of a run that has saved."""

    longest_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]


def known_save_s(folder: Path) -> float:
    """What a save took in an earlier start of the run; 0.0 where none is known."""
    try:
        return from_json(Saves, (folder / SAVES).read_bytes()).longest_s
    except (OSError, ValueError):  # a guess will do
        return 0.0


def keep_save_s(folder: Path, longest_s: float) -> None:
    """For the next start, on one rank only; where it cannot be written, that one guesses."""
    with suppress(OSError):
        write_text(folder / SAVES, to_json(Saves(longest_s)))


def run_name(config: Config) -> str:
    """`run.name` or the model's name, in characters that every file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", config.run.name or config.model.name).strip("-.") or "run"


def _claim(folder: Path) -> Path:
    if (folder / METRICS).exists():
        raise ConfigError(
            f"run.dir = '{folder}': holds an earlier run; continue it with --resume, name another folder, "
            "or remove that one"
        )
    if _is_of_the_user(folder / CONFIG):
        raise ConfigError(
            f"run.dir = '{folder}': {folder / CONFIG} is not of a run, which would write its own over it; "
            f"set run.dir to another folder, such as {folder / 'run'}, or rename that file"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _is_of_the_user(path: Path) -> bool:
    """A run writes every key, in one form; a start that fails before its first step leaves that behind."""
    try:
        return path.is_file() and path.read_text(encoding="utf-8") != to_yaml(load(path))
    except (ConfigError, UnicodeDecodeError):
        return True


def claim_new(config: Config, base: str | Path = "runs", now: datetime | None = None) -> Path:
    """`base`/<UTC time>-<name>. Of runs that start within one second each gets its own: mkdir decides who
    was first."""
    base, name = Path(base), f"{now or datetime.now(UTC):%Y%m%d-%H%M%S}-{run_name(config)}"
    for attempt in range(1, 1000):
        folder = base / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise ConfigError(f"{base}: a thousand runs are called {name}; set run.dir")
