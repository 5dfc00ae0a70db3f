"""What the benchmarks share: where things are, how runs are started, what machine this is."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def config_of(model: str) -> str:
    """The example of that name."""
    return str(ROOT / "examples" / f"{model}.yaml")


def environment() -> dict[str, str]:
    """The same for every side: one thread in every library until the program sets its own count."""
    return os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "VENV": str(Path(sys.prefix))}


def run(command: Sequence[str], timeout_s: float = 3600.0) -> str:
    """What a fresh process prints; its errors are shown when it fails. Raises SystemExit then."""
    with tempfile.TemporaryFile("w+") as out:  # ranks under a launcher block on a pipe that nobody reads
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
        out.seek(0)
        text = out.read()
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with code {done.returncode}:\n{text[-4000:]}")
    return text


def launch(ranks: int, *arguments: str) -> str:
    """`python arguments...` on that many MPI ranks of this machine."""
    return run([".ci/launch", str(ranks), sys.executable, *arguments])


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
