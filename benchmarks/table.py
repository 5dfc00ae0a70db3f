"""What README.md says of speed and memory, from the JSON lines of `benchmarks.bench`.

    make bench > results.jsonl
    python -m benchmarks.table results.jsonl [--readme]

Prints it, or writes it between the two comments of README.md. Nothing in it is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.peers import SIDES
from benchmarks.results import OURS, VARIANTS

README = Path(__file__).resolve().parents[1] / "README.md"
MARKED = re.compile(r"(?<=<!-- benchmarks -->\n).*(?=<!-- end of benchmarks -->)", re.DOTALL)
SAID = (
    "Seconds of an optimizer step of mpipipe and of stock ways to train the same model on the same cores, "
    "from the same first weights; in bold the best of them. Times ours: the median over steps by turns. What "
    "is compared: `benchmarks/README.md`."
)
HEAD = ["model", "trained by", "step", "times ours", "peak memory per rank"]


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown, with what it was measured with. The last result of each model counts."""
    results = list({found["model"]: found for found in results}.values())
    lines = [_row(HEAD), _row(["---", "---", "---:", "---:", "---:"])]
    for found in results:
        name = f"{found['model']}, {found['parameters'] / 1e6:.0f} M parameters"
        alone = _alone(found)
        for side, figures in found["sides"].items():
            compared, best = side not in (OURS, *alone), side == found["best_peer"]
            cells = _cells(side, figures, compared, best)
            lines.append(_row([name, *cells]))
            name = ""
    texts = [fill(text, 110, break_on_hyphens=False, break_long_words=False) for text in _measured(results)]
    return "\n\n".join([fill(SAID, 110), "\n".join(lines), *texts]) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _alone(found: dict[str, Any]) -> list[str]:
    """Of a benchmark by turns, the sides that had none."""
    rounds = {side: len(figures.get("step_s_by_round", ())) for side, figures in found["sides"].items()}
    return [side for side, n in rounds.items() if n == 1 and found["settings"]["turns"]]


def _cells(side: str, figures: dict[str, Any], compared: bool, best: bool) -> list[str]:
    called = "**mpipipe**" if side == OURS else _name(side)
    if "failed" in figures:
        reason = figures["failed"].replace("|", "\\|")
        return [called, f"failed: {reason}", "", ""]
    peaks = ", ".join(f"{b / 2**20:.0f}" for b in figures["peak_bytes"])
    ratio = f"{figures['ratio']:.2f}" if compared else ""
    step = f"{figures['step_s']:.3g} s"
    return [called, step, f"**{ratio}**" if best and ratio else ratio, f"{peaks} MiB"]


def _name(side: str) -> str:
    return f"mpipipe, {VARIANTS[side][0]}" if side in VARIANTS else SIDES[side]


def _measured(results: Sequence[dict[str, Any]]) -> list[str]:
    """One paragraph for each machine, date and command."""
    lines = []
    for found in results:
        m, s = found["machine"], found["settings"]
        times, how = s["turns"], "by turns"
        if not times:
            times, how = max(1, s["steps"] - 1), "alone"  # the first is left out where there are others
        of = f"{found['model']}: {'a step' if times == 1 else f'medians of {times} steps'} {how}"
        if alone := _alone(found):
            of += f". One run alone: {', '.join(map(_name, alone))}"
        arguments = f' ARGS="{" ".join(s["arguments"])}"' if s["arguments"] else ""
        by = f"on {found['date']} by `make bench{arguments}`: {s['ranks']} ranks, GEMMs by {s['gemm']}"
        at = f"{m['processor']}, {m['cores']} cores, {m['memory_gib']:.0f} GiB, {m['instruction_set']}"
        lines.append((of, f"Measured {by}; {at}, torch {m['torch']}."))
    said = dict.fromkeys(where for _, where in lines)
    return [" ".join([where, *(f"{of}." for of, w in lines if w == where)]) for where in said]


def written(text: str, new: str) -> str:
    """A README with another table. Raises ValueError when it has not exactly one place for it."""
    if len(MARKED.findall(text)) != 1:
        raise ValueError("README.md: one <!-- benchmarks --> with an <!-- end of benchmarks --> is needed")
    return MARKED.sub(lambda _: new, text)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="the table of README.md")
    parser.add_argument("results", type=Path, help="JSON lines of benchmarks.bench")
    parser.add_argument("--readme", action="store_true", help="write it into README.md")
    a = parser.parse_args(argv)
    new = table([json.loads(line) for line in a.results.read_text().splitlines() if line.startswith("{")])
    if a.readme:
        README.write_text(written(README.read_text(), new))
    else:
        print(new, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
