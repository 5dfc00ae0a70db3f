"""HTML whose text is escaped by construction: a str is text, an Html is markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_VOID = {"meta", "rect"}


class Html(str):
    """Markup, made by `tag` and `join` alone."""


def tag(name: str, /, *inside: str, **attributes: object) -> Html:
    """`tag("td", "a < b", class_="right")` is <td class="right">a &lt; b</td>; an attribute that is True
    has no value, one that is None is left out."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>" + ("" if name in _VOID else f"{join(inside)}</{name}>"))


def join(parts: Iterable[str]) -> Html:
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], class_: str | None = None) -> Html:
    """In a box of its own, which scrolls sideways on a narrow screen."""
    head = tag("tr", *(tag("th", text, scope="col") for text in headers))
    body = (
        tag("tr", tag("th", first, scope="row"), *(tag("td", text) for text in others))
        for first, *others in rows
    )
    inner = tag("table", tag("thead", head), tag("tbody", *body), class_=class_)
    return tag("div", inner, class_="wide")


def section(name: str, title: str, *inside: str) -> Html:
    return tag("section", tag("h2", title), *inside, id=name)


def legend(labels: dict[str, str]) -> Html:
    """Class of the style sheet -> what has its colour."""
    return tag(
        "ul", *(tag("li", tag("i", class_=key), text) for key, text in labels.items()), class_="legend"
    )
