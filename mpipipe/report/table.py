"""A table as text. Too wide, its words are shortened, its figures never: one that is cut is another one."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_LEAST = 12  # columns of a text that is shortened


def text_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    text_columns: Collection[int] = (0,),
    wrapped: Collection[int] = (),
    gap: int = 3,
    colour: bool = False,
) -> str:
    """At most `width` columns, if the figures leave as much.

    text_columns: indices of those with text, to the left; too long, it ends in "…". wrapped: those of
    them whose text goes on in the next line instead. gap: columns between two. colour: a bold head, for a
    terminal.
    """
    widths = _widths(headers, rows, width - gap * (len(headers) - 1), text_columns)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for i, header in enumerate(headers):
        table.add_column(
            Text(header),  # a str would be read as markup
            justify="left" if i in text_columns else "right",
            width=widths[i],
            no_wrap=i not in wrapped,
            overflow="fold" if i in wrapped else "ellipsis",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    out = io.StringIO()
    console = Console(
        file=out,
        width=sum(widths) + gap * len(headers),
        force_terminal=colour,
        color_system="standard" if colour else None,
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _widths(
    headers: Sequence[str], rows: Sequence[Sequence[str]], room: int, text_columns: Collection[int]
) -> list[int]:
    """Of each column: as it is, or the longest texts and heads cut to one length. At least the figures."""
    cells = list(zip(*rows, strict=True)) or [()] * len(headers)
    least = [0 if i in text_columns else _longest(column) for i, column in enumerate(cells)]
    full = [_longest([header, *column]) for header, column in zip(headers, cells, strict=True)]

    def cut(limit: int) -> list[int]:
        return [max(low, min(high, limit)) for low, high in zip(least, full, strict=True)]

    limit = max(full)
    while limit > _LEAST and sum(cut(limit)) > room:
        limit -= 1
    return cut(limit)


def _longest(texts: Iterable[str]) -> int:
    return max((cell_len(line) for text in texts for line in text.splitlines()), default=0)
