"""Sphinx makes build/docs of README.md, CHANGELOG.md and docs/*.md: `make docs`.

The pages stay plain Markdown that reads well without it: the contents are README's list "Where to read on",
links are those between files, anchors those of the headings.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

project = "mpipipe"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "docs/*.md", "benchmarks/README.md"]
exclude_patterns = ["build", ".venv", "runs", "wheelhouse"]
suppress_warnings = ["toc.not_included"]  # benchmarks/README.md is linked; tests/docs looks for the others
myst_heading_anchors = 3
html_theme = "alabaster"
html_theme_options = {
    "page_width": "74rem",  # room for the 110 columns of a table
    "sidebar_width": "13rem",
    "body_max_width": "none",
    "font_family": "system-ui, sans-serif",
    "font_size": "16px",
    "code_font_size": "0.8em",
    "show_powered_by": False,
}
html_sidebars = {"**": ["about.html", "navigation.html", "searchfield.html"]}
html_show_copyright = html_copy_source = False


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Appends the table of contents to the README: the pages of its last list, in that order."""
    if page == root_doc:
        pages = source[0].partition("\n## Where to read on\n")[2]
        linked = re.findall(r"^- \[.*\]\((.*)\.md\)", pages, re.MULTILINE)
        source[0] += "\n```{toctree}\n:hidden:\n" + "\n".join(linked) + "\n```\n"


def add_index(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("build-finished", add_index)
