"""What a run says while it goes: a bar on a terminal, plain lines elsewhere, and always plain
lines in train.log. Only one rank has one."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column

MIB = 1024**2


class Progress:
    """`steps` in total; a line for step 1, every `log_every`-th, those with an evaluation and the last.
    `bar`: draw a bar if the stream is a terminal."""

    def __init__(
        self, steps: int, log_every: int, log: str | Path, stream: TextIO | None = None, bar: bool = True
    ) -> None:
        self._steps, self._log_every = steps, log_every
        path = Path(log)
        self._log = path.open("a", encoding="utf-8")
        self._stream = stream or sys.stdout
        if isinstance(self._stream, TextIOWrapper):  # a sample holds what a terminal may have no word for
            self._stream.reconfigure(errors="replace")
        self._bar = self._make_bar() if self._stream.isatty() and bar else None
        self._task = self._bar.add_task("", total=steps) if self._bar else None

    def step(self, step: int, values: dict[str, float]) -> None:
        """After `step` of the steps (counted from 1); values as in {"loss": 2.5, "tokens/s": 9e3}."""
        text = "  ".join(f"{name} {number(value)}" for name, value in values.items())
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step, description=text)
        evaluated = any(name.startswith("val_") for name in values)
        if evaluated or step in (1, self._steps) or step % self._log_every == 0:
            self._write(
                f"step {step:>{len(str(self._steps))}}/{self._steps}  {text}", plain=self._bar is None
            )

    def say(self, text: str) -> None:
        """A line or several, above the bar where there is one."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._write(text, plain=self._bar is None)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
        self._log.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, text: str, plain: bool) -> None:
        for stream in (self._log, self._stream) if plain else (self._log,):
            stream.write(text + "\n")
            stream.flush()

    def _make_bar(self) -> Bar:
        columns = (
            BarColumn(16),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            # has what is left: of a narrow terminal too little, which cuts the values alone
            TextColumn("{task.description}", table_column=Column(no_wrap=True, ratio=1)),
        )
        bar = Bar(*columns, console=Console(file=self._stream), expand=True)
        bar.start()
        return bar


class Silent:
    """The progress of a rank that does not speak."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None: ...

    def say(self, text: str) -> None: ...

    def step(self, step: int, values: dict[str, float]) -> None: ...


def number(value: float) -> str:
    """Four significant digits without an exponent where a person would write none."""
    if value != 0 and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
