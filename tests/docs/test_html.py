"""`make docs`: the pages as HTML, which need no network and have no broken link."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs  # it takes two seconds
REPOSITORY = Path(__file__).resolve().parents[2]
LOADED = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*?\b(?:src|href)=\"([^\"]*)\"")


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages; the arguments are those of the Makefile."""
    out = tmp_path_factory.mktemp("html")
    command = re.search(r"sphinx-build (.*) build/docs$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert command is not None
    words = [sys.executable, "-m", "sphinx", *command[1].split(), str(out)]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_is_built_and_in_the_contents(html: Path) -> None:
    contents = (html / "index.html").read_text()
    for page in sorted((REPOSITORY / "docs").glob("*.md")):
        assert (html / "docs" / f"{page.stem}.html").exists()
        assert f'href="docs/{page.stem}.html"' in contents, f"README's last list leaves out {page.name}"


def test_nothing_is_loaded_from_elsewhere(html: Path) -> None:
    loaded = [(page, target) for page in html.rglob("*.html") for target in LOADED.findall(page.read_text())]
    assert len(loaded) > 20
    assert [(page.name, target) for page, target in loaded if "//" in target] == []
    far = re.compile(r"(url\(|@import)\s*[\"']?(https?:)?//")
    assert [path.name for path in html.rglob("*.css") if far.search(path.read_text())] == []
