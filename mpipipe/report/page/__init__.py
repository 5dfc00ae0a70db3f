"""A run as one HTML page that needs nothing else: no network, no other file.

    RunData -> sections (HTML, complete without a script)
            -> data     (JSON)  -> *.js draw it on canvases: a hundred thousand instructions stay fluid

The policy in its head allows the page's own script and style by their hashes, and nothing besides.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from mpipipe import __version__
from mpipipe.report.page.data import in_script, page_data
from mpipipe.report.page.drawings import drawings, without_script
from mpipipe.report.page.html import Html, join, tag
from mpipipe.report.page.sections import buy_back, headline, time_went
from mpipipe.report.page.tables import details, ranks
from mpipipe.report.run import RunData

__all__ = ["page"]

_SCRIPTS = ("base.js", "timeline.js", "memory.js", "chart.js", "start.js")


def page(run: RunData) -> str:
    """The text of report.html."""
    data = page_data(run)
    style = _static("page.css")
    script = '"use strict";\n{\n' + "\n".join(map(_static, _SCRIPTS)) + "}\n"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
        "form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{run.name} - mpipipe"),
        tag("style", Html(style)),
    )
    parts = [
        headline(run),
        time_went(run),
        buy_back(run),
        without_script(run),
        drawings(run, data["curves"]),
        ranks(run),
        details(run),
        tag("footer", f"made by mpipipe {__version__}"),
    ]
    body = tag(
        "body",
        tag("main", *parts),
        tag("div", id="tip", role="status", hidden=True),
        tag("script", Html(in_script(data)), type="application/json", id="data"),
        tag("script", Html(script)),
    )
    return "<!doctype html>\n" + tag("html", join([head, body]), lang="en") + "\n"


def _static(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
