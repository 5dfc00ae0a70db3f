"""What the benchmarks share: where things are, how runs are started, what machine this is."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.turns import GATE

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 3600.0
AS_PLANNED = "run.refine=false"  # for what compares a run with the plan that it began with
GRACE_S = 10.0  # for an end that was asked for


def config_of(model: str) -> str:
    """The example of that name."""
    return str(ROOT / "examples" / f"{model}.yaml")


def environment() -> dict[str, str]:
    """The same for every side: one thread in every library until the program sets its own count, and the
    launcher of this virtual environment, where it has one."""
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)])
    return os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "VENV": sys.prefix, "PATH": path}


def run(command: Sequence[str], timeout_s: float = TIMEOUT_S, gate: str = "") -> str:
    """What a fresh process prints. Raises SystemExit with it if the process fails or does not end in time.
    gate: where it waits for its turns, if that is not ""."""
    with tempfile.TemporaryFile("w+") as out:  # ranks under a launcher block on a pipe that nobody reads
        env = environment() | {GATE: gate}
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout_s)
            ended = f"ended with code {code}" if code else ""
        except subprocess.TimeoutExpired:
            ended = f"no end within {timeout_s:.0f} s"
        finally:
            _end(process)
        out.seek(0)
        text = out.read()
    if ended:
        sys.exit(f"{' '.join(command)}\n{ended}:\n{text[-4000:]}")
    return text


def _end(process: subprocess.Popen[bytes]) -> None:
    """If it still runs. .ci/launch asks its ranks to stop at the first signal and ends them at the second; a
    kill would leave them behind."""
    for stop in (process.terminate, process.terminate, process.kill):
        if process.poll() is not None:
            return
        stop()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def launch(ranks: int, *arguments: str, timeout_s: float = TIMEOUT_S, gate: str = "") -> str:
    """`python arguments...` on that many MPI ranks of this machine."""
    return run([".ci/launch", str(ranks), sys.executable, *arguments], timeout_s, gate)


def train(ranks: int, *arguments: str, timeout_s: float = TIMEOUT_S, gate: str = "") -> None:
    """`python -m mpipipe.train arguments...`; at a gate without the watchdog, to which waiting is a hang."""
    module, more = ("benchmarks.turns", ["run.watchdog=off"]) if gate else ("mpipipe.train", [])
    launch(ranks, "-m", module, *arguments, *more, timeout_s=timeout_s, gate=gate)


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """What a run has written of each step."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def seconds_text(seconds: Iterable[float]) -> str:
    return " ".join(f"{s:.3f}" for s in seconds)


def say(text: str) -> None:
    """To people, beside the JSON lines."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    import torch  # slow, and whoever only starts runs does not need it

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "Processor"))]
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * size / 2**30, 1),
        "instruction_set": str(torch.backends.cpu.get_cpu_capability()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
