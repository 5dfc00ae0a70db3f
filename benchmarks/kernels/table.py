"""What docs/kernel-speed.md says, from the JSON lines of `make bench-kernels`.

    make bench-kernels > kernels.jsonl
    python -m benchmarks.kernels.table kernels.jsonl [--docs]

Prints it, or writes it between the two comments of docs/kernel-speed.md. Nothing in it is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpipipe.planner.sizes import counted

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernel-speed.md"
MARKED = re.compile(r"(?<=<!-- kernels -->\n).*(?=<!-- end of kernels -->)", re.DOTALL)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each case, a column for each number of threads. Of equal lines the last counts."""
    lines = {(found["kernel"], found["case"], found["threads"]): found for found in results}
    threads = sorted({n for _, _, n in lines})
    columns = [counted(n, "thread") for n in threads]
    rows = [
        ["kernel", "case", *columns, "aim", "at most"],
        ["---", "---", *["---:"] * len(columns), "---:", "---"],
    ]
    for kernel, case in dict.fromkeys(key[:2] for key in lines):
        found = [lines[kernel, case, n] for n in threads if (kernel, case, n) in lines]
        ratios = [_ratio(lines.get((kernel, case, n))) for n in threads]
        rows.append([kernel, case, *ratios, _aim(found), _most(found)])
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{text}\n\n{_measured(results)}\n"


def _ratio(found: dict[str, Any] | None) -> str:
    """Of a call its microseconds."""
    if found is None:
        return ""
    if found["ratio"] is None:
        return "not measured"
    said = f"{found['us']:.1f} us" if "us" in found else f"{found['ratio']:.2f}"
    return f"{said}{' (missed)' if found['met'] is False else ''}"


def _aim(found: Sequence[dict[str, Any]]) -> str:
    """That over torch as it comes differs by the gain of the route in each run."""
    line = found[0]
    if line["aim"] is None:
        return ""
    if "routing" in line:
        return f"{_digits(round(line['aim'] / line['routing'], 3))} x the route's"
    return f"{_digits(line['aim'])}{' us' if 'us' in line else ''}"


def _digits(aim: float) -> str:
    """Those that it has, one at least."""
    return max(f"{aim:.1f}", f"{aim:g}", key=len)


def _most(found: Sequence[dict[str, Any]]) -> str:
    """Of a whole step the largest possible ratio by number of threads; of calls and memory PyTorch's own."""
    last = found[-1]
    if last["ratio"] is None:
        return str(last["reason"])
    if "us" in last:
        return f"PyTorch {last['torch_us']:.1f} us"
    if "ours_bytes" in last:
        return f"{last['ours_bytes'] / 1e6:.0f} of {last['theirs_bytes'][last['best']] / 1e6:.0f} MB"
    if "ratio" not in last["limit"]:
        return _share(last)
    routing = f"; the route alone {_each(found, 'routing')}" if "routing" in last else ""
    return f"{_each([line['limit'] for line in found], 'ratio')}{routing}"


def _each(found: Sequence[dict[str, Any]], name: str) -> str:
    return ", ".join(f"{line[name]:.2f}" for line in found)


def _share(found: dict[str, Any]) -> str:
    """Of the machine's limit with most threads, the nearer of the two."""
    achieved, limit = found["achieved"], found["limit"]
    unit = max(achieved, key=lambda name: achieved[name] / limit[name])
    return (
        f"{achieved[unit]:.0f} of {limit[unit]:.0f} {unit.upper().replace('_S', '/s').replace('GF', 'GFlop')}"
    )


def _measured(results: Sequence[dict[str, Any]]) -> str:
    """One line for each machine, date and route."""
    rounds: dict[str, list[int]] = {}
    for found in results:
        if found["rounds"]:  # else nothing was measured
            rounds.setdefault(_said(found), []).append(found["rounds"])
    return "\n".join(f"{said}, medians of {_range(of)} rounds." for said, of in rounds.items())


def _said(found: dict[str, Any]) -> str:
    m = found["machine"]
    at = f"{m['processor']}, {m['cores']} cores, kernels for {found['kernels']}, torch {m['torch']}"
    return f"Measured on {found['date']} by `make bench-kernels`: {at}, GEMMs by {found['gemm']}"


def _range(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{most}" if least == most else f"{least} to {most}"


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="the table of docs/kernel-speed.md")
    parser.add_argument("results", type=Path, help="JSON lines of benchmarks.kernels")
    parser.add_argument("--docs", action="store_true", help="write it into docs/kernel-speed.md")
    a = parser.parse_args(argv)
    new = table([json.loads(line) for line in a.results.read_text().splitlines() if line.startswith("{")])
    if not a.docs:
        print(new, end="")
        return
    text = PAGE.read_text()
    if len(MARKED.findall(text)) != 1:
        sys.exit(f"{PAGE}: one <!-- kernels --> with an <!-- end of kernels --> is needed")
    PAGE.write_text(MARKED.sub(lambda _: new, text))


if __name__ == "__main__":
    main(sys.argv[1:])
