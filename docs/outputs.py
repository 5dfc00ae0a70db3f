"""What the pages show as output, made anew by the commands above it; for a quiet machine and an active .venv.

    python docs/outputs.py [PAGE ...]      such as docs/planning.md; without a page all, and the picture

A console block is made anew when the line before it is one of

    <!-- output -->             all of what its commands, the lines behind `$ `, print
    <!-- output: first N -->    the first N lines, and ...
    <!-- run -->                the end of a run, from its losses to its hash
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["docs/quickstart.md", "docs/reports.md", "docs/planning.md", "docs/cluster.md", "README.md"]
BLOCK = re.compile(r"(?<=<!-- )(output[^\n]*|run)( -->\n```console\n)(.*?)(?=```)", re.DOTALL)


def run(command: str, folder: Path) -> list[str]:
    """The lines that a command of a page prints, started in a folder."""
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    if words[0] == "mpirun":  # ... -n N; it adds what binds no rank
        words = [str(ROOT / ".ci" / "launch"), *words[words.index("-n") + 1 :]]
    done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    may = (0, 1) if "doctor" in command else (0,)  # 1: it has found something
    if done.returncode not in may or not done.stdout:
        raise SystemExit(f"{command}: exit code {done.returncode}")
    said = done.stdout.replace("\0", "").replace(sys.prefix, ".venv").replace(str(folder), "/home/me")
    return said.rstrip().splitlines()


def excerpt(lines: list[str], note: str) -> list[str]:
    which, _, number = note.removeprefix("output: ").partition(" ")
    if which == "first":
        return [*lines[: int(number)], "..."]
    if note == "run":
        first = next(i for i, line in enumerate(lines) if " steps, final training loss " in line)
        return [
            "...",
            *lines[first : next(i for i, line in enumerate(lines) if line.startswith("weights ")) + 1],
        ]
    return lines


def anew(note: str, old: str, folder: Path) -> str:
    """A block whose commands have been run again."""
    made = []
    for line in old.splitlines():
        if line.startswith("$ "):
            print(line, file=sys.stderr)
            made += [line, *excerpt(run(line[2:], folder), note)]
    return "\n".join(line.rstrip() for line in made) + "\n"


def main(pages: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("examples", "tests"):
            (folder / part).symlink_to(ROOT / part)
        for page in pages or PAGES:
            shown = BLOCK.findall((ROOT / page).read_text())
            made = [(old, anew(note, old, folder)) for note, _, old in shown]
            text = (ROOT / page).read_text()  # again: the commands took minutes
            for old, new in made:
                text = text.replace(old, new)
            (ROOT / page).write_text(text)
        if not pages:
            run("mpirun -n 2 python -m mpipipe.train examples/gpt10m.yaml run.dir=picture", folder)
            shutil.copy(folder / "picture" / "timeline.png", ROOT / "docs" / "images" / "timeline.png")


if __name__ == "__main__":
    main(sys.argv[1:])
