"""Slips on the command line, answered before anything is loaded."""

from __future__ import annotations

import doctest
import re

import pytest

from mpipipe import __main__, errors, train


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
