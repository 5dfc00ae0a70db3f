"""`python -m mpipipe report`: what it prints, what it writes, and how it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_run import made_run

from mpipipe.__main__ import main


@pytest.mark.slow
def test_text_page_and_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (str(made_run(tmp_path / name, steps=3)) for name in "ab")
    assert main(["report", a]) == 0
    text = capsys.readouterr().out
    assert "where the time went:" in text
    assert main(["report", a, "-o", str(tmp_path / "out.txt")]) == 0
    assert (tmp_path / "out.txt").read_text() == text
    assert main(["report", a, "--html"]) == 0
    assert (tmp_path / "a" / "report.html").read_text().startswith("<!doctype html>")
    assert str(tmp_path / "a" / "report.html") in capsys.readouterr().out
    assert main(["report", a, b]) == 0
    assert "weights: the same to the bit" in capsys.readouterr().out


@pytest.mark.slow
def test_errors_are_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no run has begun there
    run = str(made_run(tmp_path / "run", steps=3))
    for args, message in (
        ([str(tmp_path / "none")], "none/config.yaml); name one, such as runs/latest"),
        (["runs/latest"], "runs/latest/config.yaml); no run has begun here; start in the folder that has "),
        ([run, run, "--html"], "--html shows one run"),
        ([run, "--html", "-o", str(tmp_path / "no" / "where.html")], "cannot be written"),
    ):
        assert main(["report", *args]) == 1
        assert capsys.readouterr().err.startswith("mpipipe: error: ")
        main(["report", *args])
        assert message in capsys.readouterr().err
