"""Drawings: what is busy in the timeline is busy in the picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mpipipe.planner import SCHEDULES, lower, simulate
from mpipipe.report.draw import draw_png, draw_text, draw_texts
from mpipipe.values import Cluster, Device, Link, Program, StageCost, Timeline

PICTURE = """\
r0 |0---1---        0=======    1=======NNNNSSSS|
r1 |    0---0~~~0:::1---1=======        NNNNSSSS|"""


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
    assert [row.count(" ") for row in rows] == [300, 300]


def test_a_box_too_narrow_for_its_number_has_none(timeline: Timeline) -> None:
    codes = tuple(np.where(c == 1, 123, c).astype(np.int32) for c in (timeline.program.codes[0][:1],))
    narrow = Timeline(Program((0,), 1, 1, codes), (np.array([[0.0, 1.0]]),), ())
    narrow.program.codes[0][0, 2] = 123
    assert draw_text(narrow, width=4 + 2 + 1) == "r0 |--|"
    assert draw_text(narrow, width=4 + 5 + 1) == "r0 |123--|"


def test_boxes_below_one_column_show_what_they_are() -> None:
    rows = draw_text(of_ranks(1, n_micro=40), width=4 + 40 + 1).split("|")[1]
    assert set(rows) == {"=", "S"}  # a B in the column of an F hides it
    assert draw_text(of_ranks(1, n_micro=2), width=4 + 13 + 1) == "r0 |0-0===1-1===S|"


def test_nothing_to_draw_is_no_error(timeline: Timeline) -> None:
    empty = Timeline(Program((), 0, 1, ()), (), ())
    assert draw_text(empty) == ""
    no_rows = Timeline(
        replace(timeline.program, codes=(np.zeros((0, 6), np.int32),)), (np.zeros((0, 2)),), ()
    )
    assert draw_text(no_rows, 10) == "r0 |     |"


@pytest.mark.slow
def test_png_has_one_panel_per_timeline_and_the_colours_of_its_boxes(
    timeline: Timeline, tmp_path: Path
) -> None:
    from matplotlib.image import imread  # here: it takes a while, and few tests draw

    draw_png({"predicted": timeline}, tmp_path / "one.png")
    draw_png({"predicted": timeline, "measured": timeline}, tmp_path / "two.png")
    one, two = imread(tmp_path / "one.png"), imread(tmp_path / "two.png")
    assert two.shape[0] > one.shape[0]
    colours = {tuple(np.rint(c * 255).astype(int)) for c in two[:, :, :3].reshape(-1, 3)[::3]}
    assert {(0x7F, 0xB3, 0xD5), (0xF0, 0xB2, 0x7A), (0xF7, 0xDC, 0x6F), (0xA9, 0xDF, 0xBF)} <= colours


def of_ranks(n: int, n_micro: int = 4) -> Timeline:
    program = lower(SCHEDULES["1f1b"](n, n_micro), (), "per_use", 4)
    cluster = Cluster((Device("cpu", 1.0, 1 << 40, 1),) * n, (0,) * n, {"node": Link(0.0, np.inf)})
    return simulate(program, (StageCost(1.0, 1.0, 1.0, 0.5, 10, 1, 0, 0, 0),) * n, cluster)


def test_several_timelines_have_one_axis_and_a_legend(timeline: Timeline) -> None:
    half = replace(timeline, times=tuple((t - 10) / 2 for t in timeline.times))
    lines = draw_texts({"predicted": half, "measured": timeline}, width=4 + 44 + 1).splitlines()
    assert lines == [
        "predicted: 5.5 s, idle 36.4%",
        "r0 |0-1-    0===  1===NNSS                      |",
        "r1 |  0-0~0:1-1===    NNSS                      |",
        "measured: 11 s, idle 36.4%",
        *PICTURE.splitlines(),
        "    0 s                 5                   10",
        "0--- forward, 0=== backward, 0~~~ input gradient,",
        "0::: weight gradient, S update, N gradient norm,",
        "blank waiting; the numbers are micro-batches",
    ]


def test_a_timeline_that_would_be_squeezed_beside_another_has_a_scale_of_its_own(timeline: Timeline) -> None:
    short = replace(timeline, times=tuple((t - 10) / 1100 for t in timeline.times))
    lines = draw_texts({"predicted": short, "measured": timeline}, width=4 + 44 + 1).splitlines()
    assert lines == [
        "predicted: 10 ms, idle 36.4%",
        *PICTURE.splitlines(),
        "    0 ms                  5",
        "measured: 11 s, idle 36.4%",
        *PICTURE.splitlines(),
        "    0 s                 5                   10",
        "0--- forward, 0=== backward, 0~~~ input gradient,",
        "0::: weight gradient, S update, N gradient norm,",
        "blank waiting; the numbers are micro-batches;",
        "each drawing has a scale of its own",
    ]


@pytest.mark.parametrize(
    ("span_s", "marks"),
    [(0.0123, [0, 2, 4, 6, 8, 10, 12]), (1.0, [0, 200, 400, 600, 800, 1000]), (9.0, range(0, 9001, 2000))],
)
def test_marks_of_the_axis_stand_at_their_times(span_s: float, marks) -> None:
    program = of_ranks(1).program
    one = Timeline(program, (np.array([[0, span_s]] * len(program.codes[0])),), (np.zeros(4, np.int64),))
    axis = draw_texts({"one": one}, width=104).splitlines()[2]
    assert axis.replace(" ms", "").split() == [f"{mark}" for mark in marks if mark * 1e-3 < span_s]
    for mark in marks:
        if mark * 1e-3 < span_s:
            assert axis[4 + round(mark * 1e-3 / span_s * 99) :].startswith(str(mark))


def test_many_ranks_are_folded_and_that_is_said() -> None:
    lines = draw_text(of_ranks(64), 80).splitlines()
    assert len(lines) == 33
    assert {len(line) for line in lines} == {80}
    assert [line.split()[0] for line in lines[:16]] == [f"r{rank}" for rank in range(16)]
    assert [line.split()[0] for line in lines[17:]] == [f"r{rank}" for rank in range(48, 64)]
    assert "ranks 16 to 47" in lines[16]
    assert len(draw_text(of_ranks(32), 80).splitlines()) == 32


@pytest.mark.slow
def test_a_picture_of_many_ranks_is_not_endless(tmp_path: Path) -> None:
    from matplotlib.image import imread  # here: it takes a while, and few tests draw

    draw_png({"predicted": of_ranks(64, n_micro=1)}, tmp_path / "many.png")
    height, width, _ = imread(tmp_path / "many.png").shape
    assert 64 * 10 < height < 2 * width
