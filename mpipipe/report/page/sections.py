"""The parts of the page that need no script: figures, words and bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from mpipipe.planner.sizes import counted
from mpipipe.report.account import Account, account
from mpipipe.report.page.html import Html, legend, section, tag
from mpipipe.report.progress import MIB, number
from mpipipe.report.run import RunData
from mpipipe.report.summary import stopped
from mpipipe.report.words import PARTS, buys_back, saving, so_far, what_ran, where
from mpipipe.values import Report

_MANY = 16  # bars, from where on they are thin
_BAR = 1000  # width of a bar in its own units


def headline(run: RunData) -> Html:
    """Title, what ran where, and the figures that one asks for first."""
    notes = [tag("p", note, class_="note") for note in run.notes]
    figures = _figures(run.report) if run.report else []
    if not run.report:
        notes += [tag("p", line) for line in so_far(run)]
    cards = (
        tag(
            "div",
            tag("dt", label),
            tag("dd", value, tag("small", unit)),
            tag("dd", beside, class_="beside"),
        )
        for label, value, unit, beside in figures
    )
    parts = [tag("h1", run.name), tag("p", " · ".join(what_ran(run)), class_="subtitle"), *notes]
    return tag("header", *parts, *([tag("dl", *cards, class_="cards")] if figures else []))


def _figures(r: Report) -> Iterator[tuple[str, str, str, str]]:
    """(what, figure, unit, what stands beside it)."""
    ratio = f", {r.step_s / r.predicted_step_s:.2f} of it" if r.predicted_step_s else ""
    yield "step", number(r.step_s * 1e3), " ms", f"predicted {number(r.predicted_step_s * 1e3)} ms{ratio}"
    yield "speed", number(r.per_s), f" {r.unit}/s", f"mean, {counted(r.steps, 'step')}{stopped(r)}"
    yield "bubble", f"{100 * r.bubble:.1f}", " %", f"predicted {100 * r.predicted_bubble:.1f} %"
    yield "training loss", number(r.final_loss), "", "of the last step"
    if r.val_loss is not None:
        of = f"{r.val_loss / r.unigram_entropy:.3f} of the unigram entropy" if r.unigram_entropy else ""
        yield "validation loss", number(r.val_loss), "", of
    for name, value in r.metrics.items():
        yield f"validation {name}", number(value), "", ""
    most = max(range(len(r.peak_bytes)), key=r.peak_bytes.__getitem__)
    predicted = f"rank {most}, predicted {number(r.predicted_peak_bytes[most] / MIB)} MiB"
    yield "peak memory", number(r.peak_bytes[most] / MIB), " MiB", predicted


def time_went(run: RunData) -> Html:
    if not run.timelines:
        return Html("")
    first, *lines = where(run.timelines)
    name = "measured" if "measured" in run.timelines else next(iter(run.timelines))
    return section(
        "where",
        "Where the time went",
        tag("p", first[0].upper() + first[1:] + ":"),
        tag("ul", *map(_sentence, lines)),
        legend({field: label for field, (label, _) in PARTS.items()}),
        _bars(account(run.timelines[name])),
    )


def _sentence(line: str) -> Html:
    """What it is about stands out."""
    about, colon, told = line.partition(":")
    return tag("li", tag("b", about, colon), told)


def _bars(accounts: Sequence[Account]) -> Html:
    rows = []
    for rank, a in enumerate(accounts):
        values = asdict(a)
        total, left, boxes = sum(values.values()) or 1.0, 0.0, []
        for field, (label, _) in PARTS.items():
            width = _BAR * values[field] / total
            title = tag("title", f"{label}: {number(values[field] * 1e3)} ms ({values[field] / total:.1%})")
            box = tag("rect", x=f"{left:.2f}", y=0, width=f"{max(0.0, width):.2f}", height=10, class_=field)
            boxes.append(tag("g", title, box))
            left += width
        share = f"{a.compute_s / total:.1%}"
        rows.append(
            tag("tr", tag("th", f"rank {rank}", scope="row"), tag("td", _bar(boxes)), tag("td", share))
        )
    return tag("table", tag("tbody", *rows), class_="bars" if len(rows) <= _MANY else "bars many")


def _bar(boxes: Sequence[Html]) -> Html:
    return tag("svg", *boxes, viewBox=f"0 0 {_BAR} 10", preserveAspectRatio="none", role="img")


def buy_back(run: RunData) -> Html:
    found, told = buys_back(run)
    body = [tag("p", f"{told[0].upper()}{told[1:]}.")]
    if found:
        longest = max(w.saved_s for w in found)
        rows = []
        for w in found:
            width = f"{_BAR * w.saved_s / longest:.1f}"
            bar = _bar([tag("rect", x=0, y=0, width=width, height=10, class_="compute_s")])
            what = tag("span", saving(w), tag("small", w.how))
            rows.append(tag("tr", tag("th", what, scope="row"), tag("td", bar)))
        body.append(tag("table", tag("tbody", *rows), class_="savings"))
    return section("buy", "What would buy it back", *body)
