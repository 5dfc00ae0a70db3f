"""Drawings: what is busy in the timeline is busy in the picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from mpipipe.report import draw_png, draw_text
from mpipipe.values import Program, Timeline

PICTURE = """\
r0 |0---1---        0=======    1=======NNNNSSSS|
r1 |    0---0~~~0:::1---1=======NNNNNNNNNNNNSSSS|"""


def test_the_picture(timeline: Timeline) -> None:
    assert draw_text(timeline, width=4 + 44 + 1) == PICTURE


@pytest.mark.parametrize("width", [1, 6, 17, 80, 200])
def test_lines_fit_the_width_and_each_other(timeline: Timeline, width: int) -> None:
    lines = draw_text(timeline, width).splitlines()
    assert len(lines) == 2
    assert {len(line) for line in lines} == {max(width, 6)}


def test_the_share_of_blanks_is_the_share_of_waiting(timeline: Timeline) -> None:
    rows = [line.split("|")[1] for line in draw_text(timeline, width=1105).splitlines()]
    assert [len(row) for row in rows] == [1100, 1100]
    assert [row.count(" ") for row in rows] == [300, 100]


def test_a_box_too_narrow_for_its_number_has_none(timeline: Timeline) -> None:
    codes = tuple(np.where(c == 1, 123, c).astype(np.int32) for c in (timeline.program.codes[0][:1],))
    narrow = Timeline(Program((0,), 1, 1, codes), (np.array([[0.0, 1.0]]),), (0,))
    narrow.program.codes[0][0, 2] = 123
    assert draw_text(narrow, width=4 + 2 + 1) == "r0 |--|"
    assert draw_text(narrow, width=4 + 5 + 1) == "r0 |123--|"


def test_nothing_to_draw_is_no_error(timeline: Timeline) -> None:
    empty = Timeline(Program((), 0, 1, ()), (), ())
    assert draw_text(empty) == ""
    no_rows = Timeline(
        replace(timeline.program, codes=(np.zeros((0, 6), np.int32),)), (np.zeros((0, 2)),), (0,)
    )
    assert draw_text(no_rows, 10) == "r0 |     |"


def test_png_has_one_panel_per_timeline_and_the_colours_of_its_boxes(
    timeline: Timeline, tmp_path: Path
) -> None:
    draw_png({"predicted": timeline}, tmp_path / "one.png")
    draw_png({"predicted": timeline, "measured": timeline}, tmp_path / "two.png")
    one, two = imread(tmp_path / "one.png"), imread(tmp_path / "two.png")
    assert two.shape[0] > one.shape[0]
    colours = {tuple(np.rint(c * 255).astype(int)) for c in two[:, :, :3].reshape(-1, 3)[::3]}
    assert {(0x7F, 0xB3, 0xD5), (0xF0, 0xB2, 0x7A), (0xF7, 0xDC, 0x6F), (0xA9, 0xDF, 0xBF)} <= colours
