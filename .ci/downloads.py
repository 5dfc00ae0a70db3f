"""Says what pip is about to download, and refuses a CUDA build of torch that nobody asked for.

    downloads.py [--cuda] REQUIREMENT...      the arguments that `pip install` would get

Exit code 3: torch is not to be had as asked for, either because there is no such version or because it is a
GPU build and refused: several gigabytes, of no use to ranks that compute on CPUs. 1: pip failed otherwise.

The list is that of a dry run. Where a package index serves no metadata beside its files, a dry run must
download a package to learn what it requires; so the run is watched, and ended at the first sign of a
GPU build instead of after its gigabytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GPU_NAMES = ("nvidia-", "cuda-", "triton", "pytorch-triton")
GPU_BUILDS = ("cu", "rocm", "xpu")  # the local part of a torch version: 2.13.0+cu130
CPU_TORCH_BYTES = 400e6  # CPU builds are about half of it, CUDA builds twice it, without their libraries
FAILED, NOT_TO_BE_HAD = 1, 3
SIZES = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
LINE = re.compile(r"\s*(?:Collecting|Downloading|Using cached) ([\w.+-]+)(?:.* \(([\d.]+) (\w+)\))?")

REFUSAL = """
refused: this torch is built for GPUs ({what}), several gigabytes that CPU ranks do not need.
Choose one:
  make setup TORCH_INDEX=<index of the CPU wheels>   as PyTorch's page Get Started shows it
  make setup TORCH=<file or version of a CPU wheel>
  make setup CUDA=1                                  take it as it is
"""


def packages(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, version) of all that would be downloaded, by name; local folders are not."""
    found = [
        (item["metadata"]["name"], item["metadata"]["version"])
        for item in report["install"]
        if "dir_info" not in item["download_info"]
    ]
    return sorted(found, key=lambda package: package[0].lower())


def gpu_parts(found: list[tuple[str, str]]) -> list[str]:
    """Those packages that only a GPU build of torch brings, torch itself included."""
    return [
        f"{name} {version}"
        for name, version in found
        if name.lower().startswith(GPU_NAMES)
        or (name == "torch" and version.partition("+")[2].startswith(GPU_BUILDS))
    ]


def sign_of_gpu(line: str) -> str | None:
    """What in a line of pip's output announces a GPU build; None when nothing does."""
    match = LINE.match(line)
    if match is None:
        return None
    name, number, unit = match.groups()
    if name.lower().replace("_", "-").startswith(GPU_NAMES):
        return name
    nbytes = float(number) * SIZES.get(unit, 0.0) if number else 0.0
    if name.startswith("torch-") and (nbytes > CPU_TORCH_BYTES or re.search(r"\+(cu|rocm|xpu)", name)):
        return f"{name}, {nbytes / 1e6:.0f} MB"
    return None


def dry_run(command: list[str], cuda: bool) -> tuple[str | None, str]:
    """Runs pip to its end or to the first sign of a GPU build: (that sign, the last lines of output).

    Raises subprocess.CalledProcessError, with those lines, when pip fails by itself."""
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            lines = [*lines[-30:], line]
            sign = None if cuda else sign_of_gpu(line)
            if sign is not None:
                pip.kill()
                return sign, "".join(lines)
    if pip.returncode:
        raise subprocess.CalledProcessError(pip.returncode, command, "".join(lines))
    return None, "".join(lines)


def no_such_torch(output: str) -> bool:
    """The index has torch, but none that fits; one that cannot be reached has no version at all."""
    return "No matching distribution found for torch" in output and "(from versions: none)" not in output


def main(requirements: list[str], cuda: bool) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--progress-bar=off", f"--report={path}"]
        try:
            sign, _ = dry_run([*pip, *requirements], cuda)
        except subprocess.CalledProcessError as error:
            print(error.output, file=sys.stderr)
            print("pip cannot find all that is needed; see above", file=sys.stderr)
            return NOT_TO_BE_HAD if no_such_torch(error.output) else FAILED
        found = [] if sign else packages(json.loads(path.read_text()))
    if found:
        print(f"to download and install ({len(found)} packages):")
        print("\n".join(f"  {name} {version}" for name, version in found), flush=True)
    gpu = [sign] if sign else gpu_parts(found)
    if gpu and not cuda:
        what = ", ".join(gpu[:3]) + (f" and {len(gpu) - 3} more" if len(gpu) > 3 else "")
        print(REFUSAL.format(what=what), file=sys.stderr)
        return NOT_TO_BE_HAD
    return 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main([a for a in arguments if a != "--cuda"], cuda="--cuda" in arguments))
