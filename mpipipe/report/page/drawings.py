"""The canvases, which the script fills, and in text what is on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpipipe.report.draw import draw_texts
from mpipipe.report.page.html import Html, join, legend, section, tag
from mpipipe.report.progress import number
from mpipipe.report.run import RunData
from mpipipe.report.summary import summary
from mpipipe.values import Op

_COLOURS = 6  # of lines: --c0 to --c5 in page.css


def drawings(run: RunData, curves: Sequence[dict[str, Any]]) -> Html:
    parts = []
    if run.timelines:
        parts += [_timelines(run), _memory(run)]
    if curves:
        parts.append(
            section(
                "curves",
                "Over the run",
                tag("div", *(_figure(i, c) for i, c in enumerate(curves)), class_="grid"),
            )
        )
    return join(parts)


def _timelines(run: RunData) -> Html:
    help_text = (
        "Wheel or + and - zoom, drag pans, double click or 0 shows all. With the arrow keys from one "
        "instruction to the next, and from rank to rank."
    )
    keys = {
        "F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "STEP": "update",
        "NORM": "gradient norm", "exposed_s": "exposed message", "bubble_s": "waiting for all ranks",
    }  # fmt: skip
    if not any((codes[:, 0] == Op.I).any() for t in run.timelines.values() for codes in t.program.codes):
        del keys["I"], keys["W"]
    buttons = (
        ("in", "+", "zoom in"),
        ("out", "\N{MINUS SIGN}", "zoom out"),
        ("all", "all", "show the whole step"),
    )
    bar = tag(
        "p",
        *(tag("button", sign, type="button", data_zoom=z, aria_label=name) for z, sign, name in buttons),
        tag("output", id="range"),
        class_="buttons",
    )
    figures = []
    for i, (name, t) in enumerate(run.timelines.items()):
        caption = f"{name}: {number(t.makespan_s * 1e3)} ms, bubble {t.bubble:.1%}"
        label = f"{caption}; one row per rank, time to the right"
        canvas = tag("canvas", data_timeline=i, tabindex=0, role="application", aria_label=label)
        figures.append(tag("figure", tag("figcaption", caption), canvas))
    return section("timelines", "One step", legend(keys), bar, *figures, tag("p", help_text, class_="help"))


def _memory(run: RunData) -> Html:
    caption = "over the step, on the same axis as above"
    canvas = tag("canvas", id="held", role="img", aria_label=f"memory {caption}, by rank")
    parts = [legend({"measured": "measured", "predicted": "predicted"})]
    parts.append(tag("figure", tag("figcaption", caption), canvas))
    if run.trace is not None and run.trace.resident_bytes:
        caption = "the highest of each step"
        canvas = tag("canvas", id="resident", role="img", aria_label=caption, tabindex=0)
        n = len(run.trace.resident_bytes)
        colours = legend({f"c{rank}": f"rank {rank}" for rank in range(n)}) if n <= _COLOURS else ""
        parts.append(tag("figure", tag("figcaption", caption, colours), canvas))
    return section("memory", "Memory of each rank", *parts)


def _figure(index: int, curve: dict[str, Any]) -> Html:
    each = f", each point the mean of {curve['per_point']} steps" if curve["per_point"] > 1 else ""
    caption, names = f"{curve['title']}{each}", [series["name"] for series in curve["series"]]
    colours = legend({f"c{i}": name for i, name in enumerate(names)}) if len(names) > 1 else ""
    canvas = tag("canvas", data_curve=index, role="img", aria_label=f"{caption}, by step", tabindex=0)
    return tag("figure", tag("figcaption", caption, colours), canvas)


def without_script(run: RunData) -> Html:
    """What stands in place of the drawings where scripts do not run."""
    parts = [draw_texts(run.timelines)] if run.timelines else []
    if run.report is not None:
        parts.append(summary(run.report))
    told = tag("p", "The drawings of this page need JavaScript. This is the run as text:")
    return tag("noscript", told, tag("pre", "\n\n".join(parts)))
