"""Says what pip is about to download, and refuses a CUDA build of torch that nobody asked for.

    pip install --dry-run --report REPORT ...  ->  downloads.py REPORT [--cuda]

Exit code 1: refused. A CUDA build is several gigabytes, and of no use to ranks that compute on CPUs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

GPU_NAMES = ("nvidia-", "cuda-", "triton", "pytorch-triton")
GPU_BUILDS = ("cu", "rocm", "xpu")  # the local part of a torch version: 2.13.0+cu130

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


def main(path: str, cuda: bool) -> int:
    found = packages(json.loads(Path(path).read_text()))
    if found:
        print(f"to download and install ({len(found)} packages):")
        print("\n".join(f"  {name} {version}" for name, version in found), flush=True)
    gpu = gpu_parts(found)
    if gpu and not cuda:
        what = ", ".join(gpu[:3]) + (f" and {len(gpu) - 3} more" if len(gpu) > 3 else "")
        print(REFUSAL.format(what=what), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], cuda="--cuda" in sys.argv[2:]))
