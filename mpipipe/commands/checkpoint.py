"""`python -m mpipipe checkpoint inspect|verify|export|merge FOLDER`: checkpoints, without MPI.

FOLDER is a checkpoint, or a run: of a run all of them (inspect, verify), or the newest whole one.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path

from mpipipe.cluster.node import cores_available
from mpipipe.commands import run
from mpipipe.commands.arguments import positive, size
from mpipipe.errors import CheckpointError, UnreadableError
from mpipipe.planner.sizes import counted, per_second, size_text
from mpipipe.report.table import text_table
from mpipipe.state.checkpoint import Reader
from mpipipe.state.packing import export, merge
from mpipipe.state.resume import FOLDER, RUN, RunState, damage, read_state, survey
from mpipipe.state.verify import flaw

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
FILE_BYTES = "50GB"
_WIDEST = 120  # columns


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    return run(lambda: options.work(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpipipe checkpoint",
        description="What is in checkpoints, whether they are whole, and copies in other files; without MPI.",
    )
    commands = parser.add_subparsers(required=True, metavar="inspect|verify|export|merge")

    def command(name: str, work: object, text: str, folder: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text, description=text)
        found.add_argument("folder", type=Path, metavar="FOLDER", help=folder)
        found.set_defaults(work=work)
        return found

    each, newest_one = (
        "a checkpoint, or a run: all of its checkpoints",
        "a checkpoint, or a run: its newest one",
    )
    command("inspect", _inspect, "steps, sizes, and what a checkpoint says of its run; reads no tensor", each)
    verify = command("verify", _verify, "reads every byte and compares it with the checksums", each)
    verify.add_argument(
        "--threads", type=positive, default=len(cores_available()), help="default: %(default)s"
    )
    plain = command("export", _export, "a plain Hugging Face folder of the weights", newest_one)
    plain.add_argument("--dtype", choices=DTYPES, help="of all floating-point tensors; default: as they are")
    whole = command("merge", _merge, "a checkpoint that resumes, in fewer files", newest_one)
    for each_of in (plain, whole):
        each_of.add_argument(
            "-o", "--output", type=Path, required=True, metavar="FOLDER", help="a new folder"
        )
        each_of.add_argument(
            "--file-size", type=size, default=FILE_BYTES, metavar="SIZE",
            help="largest file, such as 5GB; default: %(default)s",
        )  # fmt: skip
    return parser


def _all(folder: Path) -> list[tuple[Path, str]]:
    """Checkpoints, newest first, and what is wrong with each at first sight. Raises CheckpointError."""
    if (folder / FOLDER).is_dir():
        return list(survey(folder))
    if not (folder / RUN).exists():
        raise CheckpointError(
            f"{folder}: is neither a run nor a whole checkpoint; name one such as runs/latest or "
            "runs/latest/checkpoint"
        )
    return [(folder, damage(folder))]


def _one(folder: Path) -> Path:
    """Raises CheckpointError where none is whole at first sight."""
    found = _all(folder)
    whole = next((path for path, wrong in found if not wrong), None)
    if whole is None:
        reasons = [f"  {path}: {wrong}" for path, wrong in found]
        raise CheckpointError("\n".join([f"{folder}: has no checkpoint that is whole", *reasons]))
    return whole


# -- inspect ---------------------------------------------------------------------------------------


def _inspect(options: argparse.Namespace) -> None:
    found, width = _all(options.folder), min(_WIDEST, shutil.get_terminal_size((110, 24)).columns)
    rows = []
    for path, wrong in found:
        state = None if wrong else read_state(path)
        nbytes = sum(file.nbytes for file in state.files.values()) if state else 0
        size_of, files = (size_text(nbytes), str(len(state.files))) if state else ("", "")
        rows.append((path.name, files, size_of, wrong.removeprefix(f"{path}/") or "whole"))
    print(text_table(("checkpoint", "files", "size", "at first sight"), rows, width, (0, 3), (3,)))
    whole = next((path for path, wrong in found if not wrong), None)
    if whole is not None:
        print(f"\n{_described(whole, read_state(whole), width)}")


def _described(folder: Path, state: RunState, width: int) -> str:
    layout, config = state.plan.get("layout"), state.config
    told = {
        "step": str(state.step),
        "written by": f"mpipipe {state.version}",
        "weights": _tensors(Reader(folder)),
        "sha256": state.weights_sha256,
        "optimizer": f"{state.optimizer.get('kind') or 'none'}, {_tensors(Reader(folder, 'optimizer'))}",
        "numerics": ", ".join(f"{k} {_short(v)}" for k, v in asdict(state.numerics).items()),
        "graph": state.graph,
        "plan": str(state.plan.get("hash", "")),
        "layout": ", ".join(f"{k} {v}" for k, v in layout.items()) if isinstance(layout, dict) else "",
        "config": ", ".join(f"{s}.name {keys['name']}" for s, keys in config.items() if _has_name(keys)),
        "extra": ", ".join(state.extra),
    }
    rows = [(key, _printable(value)) for key, value in told.items() if value]
    return text_table((folder.name, ""), rows, width, (0, 1), (1,))


def _tensors(reader: Reader) -> str:
    by_dtype: dict[str, int] = {}
    for spec in reader.specs.values():
        by_dtype[spec.dtype] = by_dtype.get(spec.dtype, 0) + prod(spec.shape)
    numbers = " and ".join(f"{count:,} {dtype}" for dtype, count in by_dtype.items())
    return f"{numbers or 'nothing'} in {counted(len(reader.names), 'tensor')}"


def _short(value: object) -> str:
    return (
        counted(len(value), "entry").replace("entrys", "entries") if isinstance(value, dict) else str(value)
    )


def _printable(text: str) -> str:
    """A manifest may come from anywhere."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _has_name(keys: object) -> bool:
    return isinstance(keys, dict) and bool(keys.get("name"))


# -- verify, export, merge -------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> None:
    damaged, whole = [], 0
    for folder, wrong in _all(options.folder):
        if not (folder / RUN).exists() and (options.folder / FOLDER).is_dir():
            print(f"{folder}: a save that was cut off; the next one removes it")
            continue
        start, files = time.perf_counter(), {} if wrong else read_state(folder).files
        try:
            wrong, said = wrong or flaw(folder, files, options.threads), "damaged"
        except UnreadableError as error:
            wrong, said = str(error), "cannot be read just now"
        seconds = time.perf_counter() - start
        nbytes = sum(file.nbytes for file in files.values())
        rate = f"{size_text(nbytes)} in {counted(len(files), 'file')}, {per_second(nbytes / seconds, 'B/s')}"
        print(f"{folder}: {said if wrong else f'whole, {rate}'}")
        damaged += [wrong] if wrong else []
        whole += not wrong
    if not whole:
        damaged.append(f"{options.folder}: has no checkpoint that is whole")
    if damaged:
        raise CheckpointError("\n  ".join(damaged))


def _export(options: argparse.Namespace) -> None:
    folder = _one(options.folder)
    dtype = DTYPES[options.dtype] if options.dtype else None
    sizes = export(folder, options.output, options.file_size, dtype)
    _say(options.output, folder, sum(sizes.values()), len(sizes))


def _merge(options: argparse.Namespace) -> None:
    folder = _one(options.folder)
    files = merge(folder, options.output, options.file_size).files
    _say(options.output, folder, sum(file.nbytes for file in files.values()), len(files))


def _say(output: Path, folder: Path, nbytes: int, files: int) -> None:
    print(f"{output}: {folder} in {counted(files, 'file')}, {size_text(nbytes)}")
