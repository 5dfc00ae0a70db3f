"""`python -m mpipipe tokenize INPUT... -o out.bin --tokenizer PATH`: text to a token file, in parallel.

    files -> pieces of about 1 MiB, cut at line ends -> ids, by `workers` processes -> out.bin in order

The pieces do not depend on the number of workers, so neither do the bytes of out.bin. It appears whole or
not at all, with out.json beside it (see tokens.py). Runs without MPI.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mpipipe.cluster.node import cores_available
from mpipipe.data.corpus import text_files
from mpipipe.data.tokenizer import open_tokenizer
from mpipipe.data.tokens import DTYPES, Dtype, Kind, Sidecar, read_sidecar, sidecar_path
from mpipipe.errors import DataError, MpipipeError
from mpipipe.state.files import write_text, write_whole
from mpipipe.values import to_json

PIECE_BYTES = 1 << 20
_open = lru_cache(maxsize=1)(open_tokenizer)  # once per process


class Piece(NamedTuple):
    """Whole lines of a file."""

    file: Path
    line: int  # number of the first, from 1
    raw: bytes
    last: bool  # of the file


class Job(NamedTuple):
    """What every worker must know."""

    tokenizer: str
    dtype: str
    field: str  # of the objects of a .jsonl
    end: int | None  # written after each document: a file, or a line of a .jsonl


def main(argv: Sequence[str]) -> int:
    """The exit code. Text files are one document each, a .jsonl one per line; all must be UTF-8."""
    args = _arguments().parse_args(argv)
    try:
        print(tokenize(**vars(args)))
        return 0
    except MpipipeError as error:
        print(f"mpipipe: error: {error}", file=sys.stderr)
        return 1


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m mpipipe tokenize", description="Makes a token file of text.")
    add = parser.add_argument
    add("inputs", metavar="INPUT", type=Path, nargs="+", help="text files, .jsonl files, or folders of them")
    add("-o", "--output", type=Path, required=True, help="the token file, out.bin; out.json goes beside it")
    add("--tokenizer", required=True, help="tokenizer.json, a folder that holds one, or: bytes")
    add("--workers", type=int, default=len(cores_available()), help="processes; default: the cores there are")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: uint16 if the vocabulary fits")
    add("--append-eos", action="store_true", help="the end-of-text token after each document")
    add("--field", default="text", help="of the objects in .jsonl files; default: text")
    return parser


def tokenize(
    inputs: Sequence[Path], output: Path, tokenizer: str, dtype: Kind = "auto", field: str = "text",
    append_eos: bool = False, workers: int = 1,
) -> str:  # fmt: skip
    """Writes `output` and its sidecar; what was written, in a line. Raises DataError."""
    if output.suffix != ".bin" or workers < 1:
        raise DataError(
            f"output {output}, workers {workers}; expected a name that ends in .bin, and 1 or more"
        )
    read_sidecar(output)  # another file of that name is not overwritten
    known = _open(tokenizer)
    smallest: Dtype = "uint16" if known.vocab <= 1 << 16 else "uint32"
    kind: Dtype = smallest if dtype == "auto" else dtype
    if kind == "uint16" != smallest:
        raise DataError(f"--dtype uint16 holds ids below 65536, {tokenizer} has {known.vocab}; use uint32")
    if append_eos and known.eos is None:
        raise DataError(f"--append-eos: {tokenizer} has no end-of-text token; leave it out")
    files = _files(inputs)
    total = sum(f.stat().st_size for f in files)
    job = Job(tokenizer, kind, field, known.eos if append_eos else None)
    count = 0

    def fill(partial_file: Path) -> None:
        nonlocal count
        with partial_file.open("wb") as out, _bar() as bar:
            task = bar.add_task(output.name, total=total)
            for size, ids in _encoded(job, (p for f in files for p in _pieces(f)), workers):
                out.write(ids)
                bar.advance(task, size)
        count = partial_file.stat().st_size // np.dtype(DTYPES[kind]).itemsize
        if not count:
            raise DataError(f"{', '.join(map(str, inputs))}: no text in {len(files)} files; name others")
        # First, so that no token file ever stands beside what is not true of it without being noticed.
        write_text(sidecar_path(output), to_json(Sidecar(kind, known.vocab, count)))

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, fill)
    except OSError as error:
        raise DataError(
            f"{error.filename or output}: {error.strerror}; make room or choose another -o"
        ) from error
    finally:
        output.with_name(output.name + ".part").unlink(missing_ok=True)
    return f"{output}: {count} tokens ({kind}, vocabulary {known.vocab}) from {len(files)} files"


def _files(inputs: Sequence[Path]) -> list[Path]:
    for path in inputs:
        if not path.exists():
            raise DataError(
                f"{path}: no such file or folder; name text files, .jsonl files or folders of them"
            )
    return [f for path in inputs for f in (text_files(path) if path.is_dir() else [path])]


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


def _pieces(file: Path) -> Iterator[Piece]:
    with file.open("rb") as lines:
        number, raw = 1, lines.read(PIECE_BYTES) + lines.readline()
        while raw:
            after = lines.read(PIECE_BYTES) + lines.readline()
            yield Piece(file, number, raw, last=not after)
            number, raw = number + raw.count(b"\n"), after


def _encoded(job: Job, pieces: Iterator[Piece], workers: int) -> Iterator[tuple[int, bytes]]:
    """Bytes read and ids of each piece, in order; twice as many pieces as workers are under way."""
    if workers == 1:
        yield from (encode(job, piece) for piece in pieces)
        return
    under_way: deque[Future[tuple[int, bytes]]] = deque()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            under_way.extend(pool.submit(encode, job, piece) for piece in islice(pieces, 2 * workers))
            while under_way:
                yield under_way.popleft().result()
                under_way.extend(pool.submit(encode, job, piece) for piece in islice(pieces, 1))
        except BrokenProcessPool as error:
            raise DataError(
                f"a worker of {workers} was killed, as when memory is short; use fewer"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def encode(job: Job, piece: Piece) -> tuple[int, bytes]:
    """Bytes of text, and the bytes of its ids. Raises DataError."""
    tokenizer = _open(job.tokenizer)
    end = [] if job.end is None else [job.end]
    ids: list[int] = []
    if piece.file.suffix == ".jsonl":
        for text in _documents(piece, job.field):
            ids += tokenizer.encode(text) + end
    else:
        ids = tokenizer.encode(_text(piece)) + (end if piece.last else [])
    return len(piece.raw), np.array(ids, dtype=DTYPES[job.dtype]).tobytes()


def _documents(piece: Piece, field: str) -> Iterator[str]:
    for number, line in enumerate(_text(piece).split("\n"), start=piece.line):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{piece.file}, line {number}: is not JSON ({error}); mend or remove it"
            ) from error
        text = found.get(field) if isinstance(found, dict) else None
        if not isinstance(text, str):
            what = f"the keys {', '.join(found)}" if isinstance(found, dict) else f"a {type(found).__name__}"
            raise DataError(
                f"{piece.file}, line {number}: expected an object with a text under '{field}', found {what}; "
                "name the right one with --field"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{piece.file}, line {number}: its text holds half of a pair of surrogates, which is no "
                "character; mend or remove it"
            ) from error
        yield text


def _text(piece: Piece) -> str:
    try:
        return piece.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = piece.line + piece.raw[: error.start].count(b"\n")
        raise DataError(
            f"{piece.file}, line {line}: byte {piece.raw[error.start]:#x} is not UTF-8 ({error.reason}); "
            "convert the file, for instance with iconv -t utf-8"
        ) from error
