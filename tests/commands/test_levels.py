"""How a person writes numbers of ranks, and where curves go."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from mpipipe.commands.levels import check_curve_output, levels, write_curve
from mpipipe.errors import PlanError
from mpipipe.planner.curve import Curve, Level
from mpipipe.values import from_json


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("8", (8,)), ("1..64", (1, 2, 4, 8, 16, 32, 64)), ("3..20", (3, 4, 8, 16, 20)), ("5..5", (5,)),
        ("1..4:1", (1, 2, 3, 4)), ("2..9:3", (2, 5, 8, 9)),
        ("12,1,2,4,2", (1, 2, 4, 12)), ("6, 1..2", (1, 2, 6)),
    ],
)  # fmt: skip
def test_levels(text: str, numbers: tuple[int, ...]) -> None:
    assert levels(text) == numbers


@pytest.mark.parametrize(
    "text", ["", "two", "4..1", "1..4:0", "1..", "-3", "0", "0..4", "1..9999999:1", "1,,2"]
)
def test_what_is_no_number_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=repr(text).replace("+", r"\+")):
        levels(text)


@pytest.mark.slow
def test_a_curve_is_json_or_a_picture(tmp_path: Path) -> None:
    curve = Curve((Level(2, 1, 4.0, 4.0, 1.0, 0.1, 3 << 30, 20.0),), (), 1000.0, False, 2, "")
    for name in ("curve.json", "curve.png"):
        check_curve_output(name)
        write_curve(str(tmp_path / name), curve, "made")
    assert from_json(Curve, (tmp_path / "curve.json").read_text()) == curve
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(PlanError, match=r"-o plan\.txt: several levels"):
        check_curve_output("plan.txt")
    with pytest.raises(PlanError, match="cannot be written"):
        write_curve(str(tmp_path / "none" / "curve.json"), curve, "made")
