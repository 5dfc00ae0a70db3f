"""Slips on the command line, answered before anything is loaded."""

from __future__ import annotations

import doctest
import gc
import re
import runpy
import sys

import pytest

from mpipipe import __main__, errors, train
from mpipipe.runtime import process


@pytest.mark.parametrize(
    ("argv", "says"),
    [(["trian"], "'trian' is no command; did you mean 'train'?"), (["xyz"], "'xyz' is no command\n")],
)
def test_an_unknown_command_is_named(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(argv) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "usage: python -m mpipipe <command>" in said


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["a.yaml", "--steps", "50"], "error: --steps is no option; .* train.steps=50\nusage:"),
        (["--resume"], "error: no config is named\nusage:"),
    ],
)
def test_a_bad_option_is_named(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(argv) == 1
    assert re.search(says, capsys.readouterr().err)


def test_a_name_that_is_like_none_is_not_guessed() -> None:
    assert doctest.testmod(errors) == (0, 2)


def test_garbage_is_looked_for_when_all_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the program alone: whoever imports it keeps a collector that runs."""
    monkeypatch.setattr(sys, "argv", ["train", "--help"])
    monkeypatch.delitem(sys.modules, "mpipipe.train")
    while_tracer_is_imported = []
    monkeypatch.setattr(process, "warm_up_tracer", lambda: while_tracer_is_imported.append(gc.isenabled()))
    assert gc.isenabled()
    try:
        with pytest.raises(SystemExit):
            runpy.run_module("mpipipe.train", run_name="__main__")
        assert not gc.isenabled()
        process.imports_are_done()
        assert gc.isenabled()
    finally:
        gc.enable()
    assert while_tracer_is_imported == [False]


def test_the_first_line_of_an_error_is_empty_where_it_says_nothing() -> None:
    assert [errors.first_line(e) for e in (ValueError("one\ntwo"), IndexError())] == ["one", ""]
