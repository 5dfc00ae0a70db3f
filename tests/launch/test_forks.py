"""No process is started once MPI is: what a fork copies of MPI's state, threads and registered memory may
hang or break either of the two. Real ranks, a whole run (make test-mpi)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs
Launch = Callable[..., "subprocess.CompletedProcess[str]"]
CONFIG = """\
model: {name: gpt, layers: 2, d_model: 16, heads: 2, context: 16}
data: {path: corpus.txt}
train: {steps: 3, batch: 4, save_every: 2}
pipeline: {micro_batches: 2, cost_cache: false}
sample: {length: 4}
"""
# Notes what starts a process after `connect`: by Python's own events, and by the C library's handlers of fork
PROGRAM = """\
import ctypes, os, sys
import mpipipe.train

seen = []
STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "pty.spawn")
noted = ctypes.CFUNCTYPE(None)(lambda: seen.append("fork in C"))
connect = mpipipe.train.connect

def connected():
    comm = connect()
    sys.addaudithook(lambda event, args: seen.append(f"{event} {args}") if event in STARTS else None)
    assert ctypes.CDLL(None).__register_atfork(noted, None, None, None) == 0
    return comm

mpipipe.train.connect = connected
code = mpipipe.train.main(sys.argv[1:])
print("started:", seen, flush=True)
seen.clear()
if not os.fork():
    os._exit(0)
os.wait()
print("a fork is seen:", seen, flush=True)
sys.exit(code)
"""


def test_a_run_starts_no_process_after_mpi(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "watched.py").write_text(PROGRAM)
    fonts = {"MPLCONFIGDIR": str(tmp_path / "fonts")}  # whose list is made anew
    job = launch(2, "watched.py", "config.yaml", "run.dir=run", cwd=tmp_path, env=fonts, timeout_s=240.0)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("started: []") == 2, [x for x in job.stdout.splitlines() if "started" in x]
    assert job.stdout.count("a fork is seen: ['os.fork ()', 'fork in C']") == 2, job.stdout
