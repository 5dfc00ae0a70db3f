"""Fresh processes of a peer, joined by gloo."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO

from benchmarks.common import ROOT, environment

REASON_CHARACTERS = 400
# With it glibc keeps what is freed: the host of a virtual machine may take free pages back, as while a side
# waits for its turn, and a step that gets them anew takes up to 1.8 times as long.
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


class Failed(Exception):
    """A peer came to no end; the message is the reason, in one line."""


def spawn(arguments: Sequence[str], ranks: int, timeout_s: float, keep: bool = False) -> str:
    """The last line that rank 0 of `python -m benchmarks.peers` prints. keep: what glibc frees. Raises
    Failed, with the reason of the rank that failed first."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = environment() | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    env |= KEEP if keep else {}
    command = [sys.executable, "-m", "benchmarks.peers", *arguments]
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        started = [
            subprocess.Popen(
                command, cwd=ROOT, env=env | {"RANK": str(r)}, stdout=file, stderr=subprocess.STDOUT
            )
            for r, file in enumerate(files)
        ]
        failed = _wait(started, time.monotonic() + timeout_s)
        texts = [_text(file) for file in files]
    if failed is None:
        return texts[0].strip().splitlines()[-1]
    if failed < 0:
        raise Failed(f"no end within {timeout_s:.0f} s")
    raise Failed(reason(texts[failed]))


def reason(text: str) -> str:
    """The error of a traceback, else the last line of what a process said."""
    lines = [re.sub(r"^\[rank\d+\]: *", "", line) for line in text.strip().splitlines()] or [
        "it said nothing"
    ]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Failed)\b", line)]
    return (errors or lines)[-1][:REASON_CHARACTERS]


def _wait(started: list[subprocess.Popen[bytes]], deadline: float) -> int | None:
    """The rank that failed first, -1 at the deadline; the others, which would wait for it, are ended."""
    failed = None
    while any(p.poll() is None for p in started):
        codes = [p.poll() for p in started]
        if failed is None and any(codes):
            failed = next(r for r, code in enumerate(codes) if code)
        elif failed is None and time.monotonic() > deadline:
            failed = -1
        if failed is not None:
            for p in started:
                p.kill()
        time.sleep(0.05)
    if failed is None:
        failed = next((r for r, p in enumerate(started) if p.returncode), None)
    return failed


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
