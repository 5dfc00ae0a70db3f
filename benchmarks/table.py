"""What README.md and docs/benchmarks.md say of speed and memory, from the JSON lines of `benchmarks.bench`.

    make bench > results.jsonl
    python -m benchmarks.table results.jsonl [--write]

Prints the table of all sides, or writes it between the two comments of docs/benchmarks.md, and a short one
between those of README.md. Nothing in them is written by hand.
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

from benchmarks.peers import ALONE, SCHEDULES, SIDES
from benchmarks.results import CEILINGS, OURS, ROWS, VARIANTS

ROOT = Path(__file__).resolve().parents[1]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
MARKED = re.compile(r"(?<=<!-- benchmarks -->\n).*(?=<!-- end of benchmarks -->)", re.DOTALL)
SAID = (
    "Seconds of an optimizer step of mpipipe and of stock ways to train the same model on the same cores, "
    "from the same first weights; in bold the best of them. Times ours: the median over steps by turns. What "
    "is compared: `benchmarks/README.md`."
)
HEAD = ["model", "trained by", "step", "times ours", "peak memory per rank"]
GROUPS = {"best pipeline of torch": SCHEDULES, "torch DDP": ("ddp",), "torch, one process": ALONE}
IN_SHORT = (
    "Seconds of an optimizer step from the same first weights on the same cores, 2 ranks, by turns step by "
    "step; in brackets how many times as long as ours, the median over pairs of steps of one turn, where a "
    "side had turns; then the memory of the fullest rank."
)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown, with what it was measured with. The last result of each model counts."""
    results = _newest(results)
    lines = [_row(HEAD), _row(["---", "---", "---:", "---:", "---:"])]
    for found in results:
        name = _model(found)
        alone = _alone(found)
        for side, figures in found["sides"].items():
            compared, best = side not in (OURS, *alone), side == found["best_peer"]
            cells = _cells(side, figures, compared, best)
            lines.append(_row([name, *cells]))
            name = ""
    texts = [fill(text, 110, break_on_hyphens=False, break_long_words=False) for text in _measured(results)]
    return "\n\n".join([fill(SAID, 110), "\n".join(lines), *texts]) + "\n"


def in_short(results: Sequence[dict[str, Any]]) -> str:
    """Likewise, a line for each model: ours, and the best of each kind of peer."""
    results = _newest(results)
    ours = [_name(side) for side in ROWS.values()]
    lines = [_row(["model", *ours, *GROUPS]), _row(["---", *["---:"] * len([*ours, *GROUPS])])]
    for found in results:
        sides, alone = found["sides"], _alone(found)
        cells = [_cell(sides, side, alone) for side in ROWS.values()]
        for names in GROUPS.values():
            ran = [name for name in names if "ratio" in sides.get(name, {})]
            ran = [name for name in ran if name not in alone] or ran
            best = min(
                ran, key=lambda name: (round(sides[name]["ratio"], 2), sides[name]["step_s"]), default=None
            )
            cells.append(_cell(sides, best, alone) if best else "")
        lines.append(_row([_model(found), *cells]))
    at = dict.fromkeys(map(_machine, results))
    more = "All sides, and each command: [Benchmarks](docs/benchmarks.md#all-sides)."
    return "\n\n".join(["\n".join(lines), fill(f"{IN_SHORT} {'. '.join(at)}. {more}", 110)]) + "\n"


def _cell(sides: dict[str, Any], side: str, alone: Sequence[str]) -> str:
    figures = sides.get(side, {})
    if "step_s" not in figures:
        return "failed" if figures else ""
    called = f"{SIDES[side].rpartition(', ')[2]}: " if side in SCHEDULES else ""
    called = "compiled: " if side == "compile" else called
    ratio = f" ({figures['ratio']:.2f})" if side not in (OURS, *alone) else ""
    return f"{called}{figures['step_s']:.3g} s{ratio}, {max(figures['peak_bytes']) / 2**20:.0f} MiB"


def _newest(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last one of each model."""
    return list({found["model"]: found for found in results}.values())


def _model(found: dict[str, Any]) -> str:
    return f"{found['model']}, {found['parameters'] / 1e6:.0f} M parameters"


def _machine(found: dict[str, Any]) -> str:
    m = found["machine"]
    at = f"{m['processor']}, {m['cores']} cores, {m['memory_gib']:.0f} GiB, {m['instruction_set']}"
    return f"{at}, torch {m['torch']}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _alone(found: dict[str, Any]) -> list[str]:
    """Of a benchmark by turns, the sides that had none."""
    rounds = {side: len(figures.get("step_s_by_round", ())) for side, figures in found["sides"].items()}
    return [side for side, n in rounds.items() if n == 1 and found["settings"]["turns"]]


def _cells(side: str, figures: dict[str, Any], compared: bool, best: bool) -> list[str]:
    called = f"**{OURS}**" if side == OURS else _name(side)
    if "failed" in figures:
        reason = figures["failed"].replace("|", "\\|")
        return [called, f"failed: {reason}", "", ""]
    peaks = ", ".join(f"{b / 2**20:.0f}" for b in figures["peak_bytes"])
    ratio = f"{figures['ratio']:.2f}" if compared else ""
    step = f"{figures['step_s']:.3g} s"
    return [called, step, f"**{ratio}**" if best and ratio else ratio, f"{peaks} MiB"]


def _name(side: str) -> str:
    for ours, ceiling in CEILINGS.items():
        if side == ceiling:
            return f"{_name(ours)}, without bubble and message"
    return f"{OURS}, {VARIANTS[side][0]}" if side in VARIANTS else {OURS: OURS, **SIDES}[side]


def _measured(results: Sequence[dict[str, Any]]) -> list[str]:
    """One paragraph for each machine, date and command."""
    lines = []
    for found in results:
        s = found["settings"]
        times, how = s["turns"], "by turns"
        if not times:
            times, how = max(1, s["steps"] - 1), "alone"  # the first is left out where there are others
        of = f"{found['model']}: {'a step' if times == 1 else f'medians of {times} steps'} {how}"
        if alone := _alone(found):
            of += f". One run alone: {', '.join(map(_name, alone))}"
        arguments = f' ARGS="{" ".join(s["arguments"])}"' if s["arguments"] else ""
        by = f"on {found['date']} by `make bench{arguments}`: {s['ranks']} ranks, GEMMs by {s['gemm']}"
        lines.append((of, f"Measured {by}; {_machine(found)}."))
    said = dict.fromkeys(where for _, where in lines)
    return [" ".join([where, *(f"{of}." for of, w in lines if w == where)]) for where in said]


def written(text: str, new: str) -> str:
    """A page with another table. Raises ValueError when it has not exactly one place for it."""
    if len(MARKED.findall(text)) != 1:
        raise ValueError("one <!-- benchmarks --> with an <!-- end of benchmarks --> is needed")
    return MARKED.sub(lambda _: new, text)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="the tables of README.md and docs/benchmarks.md")
    parser.add_argument("results", type=Path, help="JSON lines of benchmarks.bench")
    parser.add_argument("--write", action="store_true", help="write them there")
    a = parser.parse_args(argv)
    results = [json.loads(line) for line in a.results.read_text().splitlines() if line.startswith("{")]
    if not a.write:
        print(table(results), end="")
        return
    pages = {
        page: written(page.read_text(), made(results)) for page, made in ((PAGE, table), (README, in_short))
    }
    for page, text in pages.items():
        page.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
