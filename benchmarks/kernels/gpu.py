"""The kernels for GPUs against torch, one JSON line per case: those of the processor, with tensors on a GPU.

    python -m benchmarks.kernels.gpu [swiglu ...] [--rounds 15]

Lines as those of the processor, for `benchmarks.kernels.table`; `limit` is that of the GPU. There is no bar:
that of a case is for processors. Seconds are between two points at which the GPU has nothing left to do.
torch is set as on a rank: what has the same sums each time, as far as it has that; plain attention.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Sequence

import torch

from benchmarks.common import machine, say
from benchmarks.kernels.__main__ import ROUNDS
from benchmarks.kernels.chosen import add_kernels, chosen
from benchmarks.kernels.harness import Case, compare
from benchmarks.kernels.limits import Clock, Limits, limits
from benchmarks.kernels.lines import Line, lines, said
from mpipipe.ops.device import finished, use
from mpipipe.ops.native import cuda_kernels

# no kernels for GPUs, or nothing that a GPU changes
ON_CPU_ALONE = {"calls", "gemm", "max_pool2d", "whole_step"}
TRIAD, SIZE = 1 << 27, 8192  # beyond the caches of a GPU; products that fill one


def measured(names: Sequence[str], rounds: int, device: str, clock: Clock, limit: Limits) -> Iterator[Line]:
    """Of the cases that compare seconds, with tensors on the device."""
    for cases in chosen(names, ON_CPU_ALONE):
        with torch.device(device):  # where the cases make their tensors
            for case in cases:
                if isinstance(case, Case):
                    yield from lines(case, compare(case, rounds, clock), 1, limit, barred=False)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="the kernels for GPUs against torch")
    add_kernels(parser, ON_CPU_ALONE)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    a = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("no GPU that this torch can use: nothing is measured")
    if cuda_kernels is None:
        sys.exit("no kernels for GPUs: build them with `make kernels CUDA=1`")
    use(torch.device("cuda", 0))
    torch.manual_seed(0)
    gpu = torch.cuda.get_device_properties(0)
    common = {
        "gemm": "cublas",
        "kernels": "cuda",
        "date": datetime.date.today().isoformat(),
        "machine": machine() | {"processor": gpu.name, "cores": gpu.multi_processor_count},
    }
    with torch.device("cuda"):
        limit = limits(finished, TRIAD, SIZE, units=True)
    for line in measured(a.kernels, a.rounds, "cuda", finished, limit):
        print(json.dumps(line | common), flush=True)
        say(said(line))


if __name__ == "__main__":
    main(sys.argv[1:])
