"""The compiled kernels and whole steps with them against torch: a JSON line per case and number of threads.

    python -m benchmarks.kernels [dropout ...] [--threads 1,2] [--rounds 15] [--case TEXT]

`ratio` is the seconds of the best way of torch over ours. `bar` is what a kernel aims at on the processors
that it was measured for, null on others; whether it is met is said, but never the exit code.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import benchmarks.kernels
from benchmarks.common import machine
from benchmarks.kernels.harness import Case, Compared, compare
from benchmarks.kernels.limits import CPU_INFO, Limits, has_bars, limits, set_fastest_route
from mpipipe.cluster.memory import KEPT_BYTES, keep_freed_memory
from mpipipe.native import instruction_set
from mpipipe.ops.native import kernels
from mpipipe.ops.reuse import reuse_freed_blocks

ROUNDS = 15


def modules() -> dict[str, Any]:
    """The kernels that have cases, by name."""
    names = [m.name for m in pkgutil.iter_modules(benchmarks.kernels.__path__) if m.name != "__main__"]
    found = {name: importlib.import_module(f"benchmarks.kernels.{name}") for name in names}
    return {name: module for name, module in found.items() if hasattr(module, "cases")}


def result(case: Case, found: Compared, threads: int, limit: Limits, barred: bool) -> dict[str, Any]:
    """The figures of one line. A case with a floor is limited by it, any other by the machine."""
    ratio, rates = round(found.ratio, 3), (case.bytes / found.ours_s / 1e9, case.flops / found.ours_s / 1e9)
    achieved, limits = Limits(*rates).as_dict(), limit.as_dict()
    if found.at_most is not None:
        achieved, limits = {"ratio": ratio}, {"ratio": round(found.at_most, 3)}
    bar = case.bar if barred else None
    return {
        "kernel": case.kernel,
        "case": case.case,
        "threads": threads,
        "ratio": ratio,
        "bar": bar,
        "met": None if bar is None else found.ratio >= bar,
        "quartiles": [round(q, 3) for q in found.quartiles],
        "ours_s": found.ours_s,
        "best": found.best,
        "ratios": {name: round(ratio, 3) for name, ratio in found.ratios.items()},
        "unmeasured": found.unmeasured,
        "bytes": case.bytes,
        "flops": case.flops,
        "achieved": achieved,
        "limit": limits,
        "rounds": found.rounds,
    }


def said(line: dict[str, Any]) -> str:
    """A line for people."""
    bar = "" if line["bar"] is None else f", bar {line['bar']:.2f}: {'met' if line['met'] else 'MISSED'}"
    threads = f"{line['threads']} thread{'' if line['threads'] == 1 else 's'}"
    low, high = line["quartiles"]
    achieved, limit = line["achieved"], line["limit"]
    if "ratio" in limit:
        share = f"{100 / limit['ratio']:.0f} % of {line['best']}'s seconds"
        most = f"at most {limit['ratio']:.2f}, as the products alone take {share}"
    else:
        rates = f"{achieved['gf_s']:.1f} of {limit['gf_s']:.0f} GF/s"
        most = f"{achieved['gb_s']:.1f} of {limit['gb_s']:.0f} GB/s, {rates}"
    return (
        f"{line['kernel']}, {line['case']}, {threads}: {line['ratio']:.2f} ({low:.2f} to {high:.2f}) "
        f"times {line['best']}{bar}; {line['ours_s'] * 1e3:.3g} ms, {most}"
    )


def measured(
    names: Sequence[str], threads: Sequence[int], rounds: int, only: str
) -> Iterator[dict[str, Any]]:
    """One kernel after the other: the tensors of its cases live no longer."""
    barred = has_bars(CPU_INFO.read_text()) if CPU_INFO.exists() else False
    found = modules()
    at = {}
    for n in threads:
        torch.set_num_threads(n)
        at[n] = limits()
    for name in names or found:
        for case in found[name].cases():
            for n in threads if only in case.case else ():
                torch.set_num_threads(n)
                yield result(case, compare(case, rounds), n, at[n], barred)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="the compiled kernels against torch")
    parser.add_argument("kernels", nargs="*", choices=[[], *modules()], metavar="kernel", help="default: all")
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
    for line in measured(a.kernels, threads, a.rounds, a.case):
        print(json.dumps(line | common), flush=True)
        print(said(line), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
