"""Which checkpoints a run has, which of them are whole, and what was true when they were written.

runs/X/checkpoints/step-00000100/   model-*.safetensors, optimizer-*.safetensors, their indexes, and
                                    run.json, the manifest: written last, with size and sha256 of every
                                    other file, and its own
runs/X/checkpoint -> checkpoints/step-00000100     the newest

Invariants
  1. A checkpoint is whole when its run.json is there and every file has the size that it names.
  2. run.json appears last and goes first: a kill at any point leaves a whole checkpoint, or a folder
     without run.json, which `newest` passes over and `prune` removes.
  3. So a folder with run.json that is not whole was damaged later, was written by another version or
     cannot be read just now: nothing here removes or changes it, and only proven damage sets it aside.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

from mpipipe.errors import CheckpointError, ConfigError, UnreadableError
from mpipipe.state.files import (
    cannot_read,
    check_proves_damage,
    inside,
    kind_of,
    link_whole,
    read_small,
    sync_folder,
)
from mpipipe.state.writing import File
from mpipipe.values import Numerics, Value, from_json, to_json

RUN = "run.json"
FOLDER, LINK = "checkpoints", "checkpoint"
_STEP = re.compile(r"step-(\d{8,})")
_OURS = re.compile(
    r"((model|optimizer)(-\d+-of-\d+)?\.safetensors(\.index\.json)?|rank-\d+\.json|run\.json)(\.part)?"
)
_FORMAT = 1
_HEAD = re.compile(rb'\{"checkpoint": (\d{1,9}), "sha256": "([0-9a-f]{64})", "run":')
_TAIL = b"\n}\n"


def _tagged(value: Any) -> Any:
    """JSON has no number for infinity and not-a-number: {"float": "inf"}."""
    if isinstance(value, dict):
        return {key: _tagged(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tagged(item) for item in value]
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("float") in ("inf", "-inf", "nan") and len(value) == 1:
        return float(value["float"])
    return {key: _untagged(item) for key, item in value.items()}


Json = Annotated[
    dict[str, Any], BeforeValidator(_untagged), PlainSerializer(_tagged)
]  # floats keep every bit


@dataclass(frozen=True)
class RunState(Value):
    """What a run needs, beside its tensors, to go on as if nothing had happened; what was known of it; and
    what its files are."""

    # optimizer steps done: the number of the next batch. Batches, random numbers and the learning rate of a
    # built-in optimizer are functions of it and of `numerics`; a scheduler's state is in `optimizer`
    step: Annotated[int, Field(ge=0)]
    numerics: Numerics
    graph: str  # hash of the model's graph
    optimizer: Json  # its kind and what it keeps beside tensors: `runtime.optimizer.described`
    plan: Json = field(default_factory=dict)  # its hash, layout and prediction; a resume plans anew
    config: Json = field(default_factory=dict)  # all keys, of a run that had one
    # of an epoch how many samples, and the sha256 of the first ones (`checks.check_samples`); of an earlier
    # version nothing, so nothing is compared
    data: Json = field(default_factory=dict)
    extra: Json = field(default_factory=dict)  # the caller's own, plain JSON
    version: str = ""  # of the mpipipe that wrote it
    files: dict[str, File] = field(default_factory=dict)  # all others of the folder; `save` fills it in
    weights_sha256: str = ""  # of parameters and buffers; `save` fills it in


def to_text(state: RunState) -> str:
    """The manifest: JSON, with the sha256 of all lines between the first and the last one."""
    body = to_json(state)
    sha256 = hashlib.sha256(body.encode()).hexdigest()
    return f'{{"checkpoint": {_FORMAT}, "sha256": "{sha256}", "run":\n{body}\n}}\n'


def _from_text(text: bytes) -> RunState:
    """Raises ValueError."""
    head, _, rest = text.partition(b"\n")
    found = _HEAD.fullmatch(head)
    if found is None or int(found[1]) != _FORMAT:
        raise ValueError(f"it begins with {head[:40]!r}, not with a checkpoint of format {_FORMAT}")
    if not rest.endswith(_TAIL) or hashlib.sha256(rest[: -len(_TAIL)]).hexdigest() != found[2].decode():
        raise ValueError("its lines have another sha256 than the first one says")
    return from_json(RunState, rest[: -len(_TAIL)])


def step_folder(run_dir: str | Path, step: int) -> Path:
    """Where the checkpoint after `step` steps belongs."""
    return Path(run_dir) / FOLDER / f"step-{step:08d}"


def read_state(folder: str | Path) -> RunState:
    """Raises CheckpointError when the folder is no checkpoint, or one that was cut off."""
    path = Path(folder) / RUN
    try:
        return _from_text(read_small(inside(path.parent, RUN)))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: not found; the folder is no checkpoint of a run, or one that was cut off"
        ) from error
    except (OSError, ValueError) as error:
        text = cannot_read(path, error)
        raise CheckpointError(f"{text}; damaged, or written by another version of mpipipe") from error


def damage(folder: str | Path) -> str:
    """What keeps a folder from being a whole checkpoint; empty when nothing does. Reads no tensor."""
    try:
        return proven_damage(folder)
    except UnreadableError as error:
        return str(error)


def proven_damage(folder: str | Path) -> str:
    """As `damage`. Raises UnreadableError where that cannot be told just now."""
    try:
        files = read_state(folder).files
    except UnreadableError:
        raise
    except CheckpointError as error:
        return str(error)
    for name, facts in files.items():
        path = Path(folder) / name
        try:
            found = inside(path.parent, name).stat().st_size
        except OSError as error:
            check_proves_damage(path, error)
            return f"{path}: cannot be read ({error.strerror})"
        except ValueError as error:
            return f"{folder}: {error}"
        if found != facts.nbytes:
            return f"{path}: has {found} bytes, {RUN} says {facts.nbytes}"
    return ""


def survey(
    run_dir: str | Path,
    above: float = -1,
    before: float = math.inf,
    look: Callable[[Path], str] | None = None,
) -> Iterator[tuple[Path, str]]:
    """The checkpoints of a run, newest first, each with its `damage`; of more steps than `above`, and fewer
    than `before`. Each is looked at when it is asked for: a run may have kept a hundred, of as many files as
    ranks. look: what says it instead, as `proven_damage`."""
    return ((folder, (look or damage)(folder)) for folder in _folders(run_dir, above, before))


def _folders(run_dir: str | Path, above: float = -1, before: float = math.inf) -> list[Path]:
    """As `survey`, whatever is in them."""
    steps = {path: _step(path) for path in (Path(run_dir) / FOLDER).glob("*")}
    found = (path for path, step in steps.items() if above < step < before)
    return sorted(found, key=steps.__getitem__, reverse=True)


def unreadable(found: Iterable[tuple[Path, str]]) -> list[tuple[Path, str]]:
    """Of checkpoints and what is wrong with each, those that were whole once (invariant 3)."""
    return [(folder, wrong) for folder, wrong in found if wrong and _written(folder)]


def _written(folder: Path) -> bool:
    """Whether run.json is there; also where that cannot be told, for what hangs on it is a removal."""
    try:
        (folder / RUN).lstat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _step(path: Path) -> int:
    """The step of a checkpoint's folder; -1 for anything else."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match and path.is_dir() and not path.is_symlink() else -1


def newest(run_dir: str | Path) -> Path | None:
    """The newest whole checkpoint, or None. `survey` says what is wrong with those passed over."""
    return next((folder for folder, wrong in survey(run_dir) if not wrong), None)


def prune(run_dir: str | Path, keep: int, keep_every: int = 0) -> list[Path]:
    """Points `checkpoint` at the newest whole checkpoint, then removes all whole ones but the newest `keep`
    (1 or more) and those of every `keep_every`-th step (0: of none), and what saves that were cut off left
    behind. For one rank, after a save.

    Gives the folders that could not be removed: the next call tries again. While no checkpoint is
    whole it changes nothing. Raises CheckpointError when the link cannot be made.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep}: a run keeps at least its newest checkpoint")
    run_dir = Path(run_dir)
    whole, older, cut_off = list[Path](), list[Path](), list[Path]()
    for folder in _folders(run_dir):
        # of those that stay the files are not looked at: with every save there may be one more
        stays = len(whole) == keep and keep_every and _step(folder) % keep_every == 0
        if not stays and not damage(folder):
            (whole if len(whole) < keep else older).append(folder)
        elif not _written(folder):
            cut_off.append(folder)
    if not whole:
        return []
    try:
        link_whole(run_dir / LINK, f"{FOLDER}/{whole[0].name}")
    except OSError as error:
        raise CheckpointError(
            f"{run_dir / LINK}: cannot be made a link to {whole[0]} ({error.strerror}); "
            "move away what is there",
            kind=kind_of(error),
        ) from error
    return [folder for folder in [*older, *cut_off] if not _remove(folder)]


def set_aside(found: Iterable[tuple[Path, str]]) -> list[Path]:
    """Renames `unreadable` checkpoints to <name>.damaged, where they are in nobody's way; on one rank.
    Raises CheckpointError."""
    moved = []
    for folder, _ in unreadable(found):
        for number in count():
            target = folder.with_name(f"{folder.name}.damaged{number or ''}")
            if not target.exists():
                break
        try:
            folder.rename(target)
        except OSError as error:
            raise CheckpointError(
                f"{folder}: cannot be renamed to {target.name} ({error.strerror})", kind=kind_of(error)
            ) from error
        moved.append(target)
    return moved


def _remove(folder: Path) -> bool:
    try:
        (folder / RUN).unlink(missing_ok=True)
        sync_folder(folder)
        shutil.rmtree(folder)
    except OSError:
        return False
    return True


def make_room(folder: Path) -> None:
    """Makes an empty place for a checkpoint; what a save that was cut off left in a step's folder goes.

    Raises CheckpointError where another checkpoint is in the way, whole or not, OSError.
    """
    wrong = damage(folder)
    if not wrong:
        raise CheckpointError(f"{folder}: already holds a whole checkpoint; save to another folder")
    if _written(folder):
        raise CheckpointError(
            f"{wrong}\n  {folder} was a whole checkpoint once and is in the way: move it away, or save to "
            "another folder"
        )
    in_the_way = _ours(folder)
    if in_the_way and _step(folder) < 0:
        raise CheckpointError(
            f"{in_the_way[0]}: in the way, and not of a checkpoint of this run; save to another folder"
        )
    for path in in_the_way:
        path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    sync_folder(folder.parent)


def discard(folder: Path) -> None:
    """Removes the files of a save that failed, run.json first, as far as that goes."""
    with suppress(OSError):  # the next save or `prune` sees to what is left; nothing goes before run.json
        for path in _ours(folder):
            path.unlink()
        folder.rmdir()


def _ours(folder: Path) -> list[Path]:
    """The files of a checkpoint, run.json first."""
    found = [path for path in folder.glob("*") if _OURS.fullmatch(path.name)]
    return sorted(found, key=lambda path: (path.name != RUN, path.name))


def way_out(folder: Path) -> str:
    """The next move of somebody whose checkpoint turns out to be damaged."""
    others = survey(folder.parent.parent, before=_step(folder))  # of -1 there is none before
    older = next((path for path, wrong in others if not wrong), None)
    if older is None:
        return "no older checkpoint is whole: restore the file, or start the run anew"
    return f"{older} is whole: remove {folder}, and --resume goes on from there"


def check_graph(folder: Path, saved: str, now: str) -> None:
    """saved, now: hashes of the graph. Raises CheckpointError where they differ."""
    if saved != now:
        raise CheckpointError(
            f"{folder}: made by another form of this model or loss (graph {saved[:8]}, now {now[:8]}); go "
            "back to it, or go on with --new-numerics"
        )


def check_data(folder: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """saved, now: as in `RunState`. Raises CheckpointError where both are known and differ."""
    names = {"samples": "samples for training", "first_sha256": "sha256 of the first samples"}
    pairs = [(text, saved.get(name), now.get(name)) for name, text in names.items()]
    lines = "\n".join(f"  {text}: {a} in the checkpoint, {b} now" for text, a, b in pairs if a != b)
    if saved and now and lines:
        raise CheckpointError(
            f"{folder}: was trained on other data than those that are there now\n{lines}\n"
            "  put them back, and what they are read by (model.context, collate, shuffle), or go on with "
            "these by --new-numerics (in a script: new_data=True)"
        )


def check_numerics(saved: Numerics, now: Numerics, version: str = "") -> None:
    """Raises ConfigError with every field that differs: the run would go on with other bits. version: of the
    mpipipe that wrote the checkpoint. Of kernels that it does not name nothing is known to differ."""
    left = set() if saved.kernels else {"kernels"}
    if saved.bits != now.bits:  # from which these follow
        left = {"kernels", "op_table"}
    fields = [f.name for f in dataclasses.fields(Numerics) if f.name not in left]
    pairs = [(name, getattr(saved, name), getattr(now, name)) for name in fields]
    lines = "\n".join(f"  {name}: {a!r} in the checkpoint, {b!r} now" for name, a, b in pairs if a != b)
    if lines:
        differ = saved.kernels and now.kernels and saved.kernels != now.kernels
        by = f" (kernels: with the mpipipe that wrote the checkpoint, {version})" if differ else ""
        raise ConfigError(
            f"--resume: what decides the bits of this run has changed\n{lines}\n"
            f"  set it back{by}, or start a new numerical history from this checkpoint with --new-numerics"
        )
