"""The compiled kernels and whole steps with them against torch: a JSON line per case and number of threads.

    python -m benchmarks.kernels [dropout ...] [--threads 1,2] [--rounds 15] [--case TEXT]

`ratio` is the seconds of the best way of torch over ours, or its bytes. `aim` is what a kernel aims at, and
`bar` the same on the processor for which it was set, null on others; whether it is met is said, but never
the exit code.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.common import machine, say
from benchmarks.kernels.chosen import add_kernels, chosen
from benchmarks.kernels.harness import Case, Skipped, compare
from benchmarks.kernels.limits import CPU_INFO, UNCACHED, Limits, Seen, has_bars, set_fastest_route
from benchmarks.kernels.lines import lines, of_memory, of_skipped, said
from benchmarks.kernels.memory import Memory, taken
from mpipipe.cluster.launch import advice_here
from mpipipe.cluster.memory import KEPT_BYTES, keep_freed_memory
from mpipipe.native import instruction_set
from mpipipe.ops.native import kernels
from mpipipe.ops.reuse import reuse_freed_blocks

ROUNDS = 15


def measured(
    names: Sequence[str], threads: Sequence[int], rounds: int, only: str
) -> Iterator[dict[str, Any]]:
    """One group after the other: the tensors of its cases live no longer. Limits come before it."""
    barred = has_bars(CPU_INFO.read_text()) if CPU_INFO.exists() else False
    seen = Seen()
    for cases in chosen(names):
        for n in threads:
            seen.again(n)
        for case in cases:
            if only in case.case:
                yield from _of(case, threads, rounds, seen, barred)


def _of(
    case: Case | Memory | Skipped, threads: Sequence[int], rounds: int, seen: Seen, barred: bool
) -> Iterator[dict[str, Any]]:
    if isinstance(case, Memory):
        yield of_memory(case, taken(case), threads[0])  # no matter of threads
        return
    for n in threads:
        if isinstance(case, Skipped):
            yield of_skipped(case, n, barred)
            continue
        torch.set_num_threads(n)
        compared = compare(case, rounds)
        moved = case.bytes if case.bytes >= UNCACHED else 0
        achieved = Limits(moved / compared.ours_s / 1e9, case.flops / compared.ours_s / 1e9)
        limit = seen.at_least(n, achieved, case.bf16)
        yield from lines(case, compared, n, limit, barred)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="the compiled kernels against torch")
    add_kernels(parser)
    parser.add_argument("--threads", default="1,2", help="numbers of threads, with commas")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fewer where a case takes long")
    parser.add_argument("--case", default="", help="only cases with this text in their name")
    a = parser.parse_args(argv)
    if kernels is None:
        sys.exit("the compiled kernels are not there: build them with `make setup`")
    torch.manual_seed(0)
    keep_freed_memory()  # on both sides, as in a run: else page faults are measured
    reuse_freed_blocks(KEPT_BYTES)
    common = {
        "gemm": set_fastest_route(),
        "kernels": instruction_set(),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
    }
    threads = [int(n) for n in a.threads.split(",")]
    if busy := advice_here():
        say(f"note: {busy}")
    for line in measured(a.kernels, threads, a.rounds, a.case):
        print(json.dumps(line | common), flush=True)
        say(said(line))


if __name__ == "__main__":
    main(sys.argv[1:])
