"""The kernels for GPUs against torch, one JSON line per case: those of the processor, with tensors on a GPU.

    python -m benchmarks.kernels.gpu [swiglu ...] [--rounds 15]

There is no bar: the cases' own are for processors. Seconds are those between two points at which the GPU has
nothing left to do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.kernels.__main__ import ROUNDS, modules
from benchmarks.kernels.harness import compare
from mpipipe.ops.native import cuda_kernels

ON_CPU_ALONE = {"embedding", "whole_step"}


def clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def main(argv: Sequence[str]) -> None:
    found = {name: module for name, module in modules().items() if name not in ON_CPU_ALONE}
    parser = argparse.ArgumentParser(description="the kernels for GPUs against torch")
    parser.add_argument("kernels", nargs="*", choices=[[], *found], metavar="kernel", help="default: all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    a = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("no GPU that this torch can use: nothing is measured")
    if cuda_kernels is None:
        sys.exit("no kernels for GPUs: build them with `make kernels CUDA=1`")
    torch.manual_seed(0)
    for name in a.kernels or found:
        with torch.device("cuda"):  # where the cases make their tensors
            for case in found[name].cases():
                line = {"kernel": case.kernel, "case": case.case, "gpu": torch.cuda.get_device_name()}
                print(json.dumps(line | dataclasses.asdict(compare(case, a.rounds, clock))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
