"""Summary, progress and metrics: what is said is what was measured."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from mpipipe.report import Metrics, Progress, cut_metrics, read_metrics, summary
from mpipipe.report.metrics import last_step
from mpipipe.report.progress import number
from mpipipe.report.table import text_table
from mpipipe.values import RankReport, Report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def row(text: str, head: str) -> list[str]:
    return next(line.removeprefix(head).split() for line in text.splitlines() if line.startswith(head))


def test_summary_puts_predicted_next_to_measured(report: Report) -> None:
    text = summary(report)
    assert row(text, "time, ms") == ["500", "550", "1.10"]
    assert row(text, "idle share (bubble)") == ["0.1", "0.125", "1.25"]
    by_rank = text.replace("|", "")
    assert row(by_rank, "0 ") == ["0", "7", "1.23", "400", "440", "20.0", "21.0", "12.3", "3", "200", "300"]
    assert row(by_rank, "1 ") == ["1", "9", "0.04568", "450", "500", "10.0", "9.0", "0", "1", "250", "250"]
    bars = {
        tuple(at for at, sign in enumerate(line) if sign == "|")
        for line in text.splitlines()
        if line.startswith(("0 ", "1 "))
    }
    assert len(bars) == 1, "the bars stand below each other"
    assert "validation loss 2.25 = 0.750 of the unigram entropy 3\n" in text
    assert "200 steps, final training loss 2.2, 7448 tokens/s in the mean\n" in text
    assert f"weights {report.weights_sha256}\n" in text
    assert f"plan {report.plan_hash}\n" in text


def test_spares_that_were_left_are_named(report: Report) -> None:
    assert "spare" not in summary(report)
    assert "\nspare, to the end: ranks 2, 3\n" in summary(replace(report, spares=(2, 3)))


def test_summary_fits_the_screen_and_has_colours_only_when_asked(report: Report) -> None:
    plain = summary(of_many(report, 24))
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= 110
    assert "..." not in plain
    assert "\u2026" not in plain
    assert "\x1b" not in plain
    assert "\x1b" in summary(report, colour=True)


def test_summary_says_by_what_was_computed(report: Report) -> None:
    assert "kernels" not in summary(report)
    products, kernels = "fp32 products: MKL", "kernels: bias_gelu, as before; left to torch: layer_norm"
    assert f"\n{products}\n{kernels}\nplan " in summary(replace(report, products=products, kernels=kernels))


def of_many(report: Report, n: int) -> Report:
    """Ranks of a large model; the slowest is rank 3, the fullest rank 5."""
    one = RankReport((0,), 12, 1_100_000_000, 98.7654, 101.234, 0.123456, 0.234567, 0.0123456, 123456789)
    ranks = [replace(one, stages=(s,), compute_s=110.5 if s == 3 else 100.0 + s / n) for s in range(n)]
    peaks = tuple((30 << 30) + (1 << 30) * (s == 5) for s in range(n))
    return replace(report, ranks=tuple(ranks), peak_bytes=peaks, predicted_peak_bytes=(29 << 30,) * n)


def test_summary_of_many_ranks_shows_their_spread_and_the_worst(report: Report) -> None:
    text = summary(of_many(report, 101))
    lines = text.split("by rank")[1].split("\n\n")[0].splitlines()[2:]
    assert [line.split("  ")[0] for line in lines] == ["least", "median", "most", "slowest: 3", "fullest: 5"]
    measured = [line.split("|")[1].split()[0] for line in lines]  # compute, ms
    assert measured == ["100000", "100505", "110500", "110500", "100050"]
    assert [line.split()[-1] for line in lines] == ["30720", "30720", "31744", "30720", "31744"]
    assert max(map(len, lines)) <= 110


def test_summary_of_a_run_without_validation_or_prediction(report: Report) -> None:
    bare = replace(report, val_loss=None, unigram_entropy=None, predicted_bubble=0.0, stopped_by="SIGTERM")
    text = summary(bare)
    assert "validation" not in text
    assert row(text, "idle share (bubble)") == ["0", "0.125", "-"]
    assert ", asked to stop (SIGTERM)" in text
    assert "entropy" not in summary(replace(report, unigram_entropy=None))


def test_a_table_that_is_too_wide_shortens_words_and_no_figure() -> None:
    rows = [("run[red]1", "a" * 40, "123456789.125"), ("short", "b c " * 5, "7")]
    for width in (110, 50, 20):
        lines = text_table(("name", "[bold]why", "figure"), rows, width, (0, 1)).splitlines()
        assert len(lines) == 3
        assert lines[0].split() == ["name", "[bold]why", "figure"]
        assert lines[1].startswith("run[red]1   aaaaaaaa")
        assert [line.split()[-1] for line in lines[1:]] == ["123456789.125", "7"]
        assert ("…" in lines[1]) == (width < 110)
        assert max(map(len, lines)) <= max(width, 9 + 3 + 12 + 3 + 13)


def test_a_text_that_goes_on_below_is_whole() -> None:
    lines = text_table(("key", "value"), [("k", "x" * 70)], 30, (0, 1), wrapped=(1,)).splitlines()
    assert "".join(line.split()[-1] for line in lines[1:]) == "x" * 70
    assert max(map(len, lines)) <= 30
    assert text_table(("a", "b"), [], 30) == "a   b"


def test_progress_writes_plain_lines_to_a_pipe_and_to_the_log(tmp_path: Path) -> None:
    out, log = io.StringIO(), tmp_path / "train.log"
    with Progress(25, 10, log, out) as progress:
        progress.say("starting [bold]")
        for step in range(1, 26):
            progress.step(step, {"loss": 2.0 / step, "tokens/s": 12345.6})
    lines = out.getvalue().splitlines()
    assert lines == [
        "starting [bold]",
        "step  1/25  loss 2  tokens/s 12346",
        "step 10/25  loss 0.2  tokens/s 12346",
        "step 20/25  loss 0.1  tokens/s 12346",
        "step 25/25  loss 0.08  tokens/s 12346",
    ]
    assert log.read_text() == out.getvalue()


def test_a_stream_that_has_no_word_for_a_character_is_no_reason_to_fail(tmp_path: Path) -> None:
    out, log = io.TextIOWrapper(io.BytesIO(), encoding="latin-1"), tmp_path / "train.log"
    with Progress(1, 1, log, out) as progress:
        progress.say("a\ufffd\u00e4")
    assert out.buffer.getvalue() == "a?\u00e4\n".encode("latin-1")  # type: ignore[attr-defined]
    assert log.read_text(encoding="utf-8") == "a\ufffd\u00e4\n"


def test_progress_draws_a_bar_on_a_terminal_and_plain_lines_in_the_log(tmp_path: Path) -> None:
    out, log = Terminal(), tmp_path / "train.log"
    with Progress(20, 10, log, out) as progress:
        for step in range(1, 21):
            progress.step(step, {"loss": 1.5})
        progress.say("done [bold]")
    assert "20/20" in out.getvalue()
    assert "done [bold]" in out.getvalue()
    assert log.read_text().splitlines() == [
        "step  1/20  loss 1.5", "step 10/20  loss 1.5", "step 20/20  loss 1.5", "done [bold]",
    ]  # fmt: skip


def test_a_narrow_terminal_cuts_the_values_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    with Progress(180, 10, tmp_path / "train.log", out) as progress:
        progress.step(15, {"loss": 2.903, "lr": 0.0027, "grad_norm": 1.27, "step_s": 0.41, "tokens/s": 9e4})
    *_, drawn = [line for line in out.getvalue().splitlines() if "15/180" in line]
    assert "-:--:--" in drawn
    assert "loss 2.903" in drawn
    assert "…" in drawn


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (2.34567, "2.346"), (1234.56, "1235"), (3e-4, "0.0003"), (1.2345e-5, "1.23e-05"),
     (0.00123456, "0.001235"), (123456.0, "123456"), (2e9, "2e+09"), (-5.5, "-5.5"), (math.nan, "nan")],
)  # fmt: skip
def test_numbers_read_well(value: float, text: str) -> None:
    assert number(value) == text


def test_metrics_are_on_disk_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as metrics:
        metrics.write(step=1, loss=2.5)
        assert read_metrics(path) == [{"step": 1, "loss": 2.5}]
        metrics.write(step=2, loss=math.nan, norms=[1.0, math.inf], eval={"loss": -math.inf})
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert lines[1] == {"step": 2, "loss": "nan", "norms": [1.0, "inf"], "eval": {"loss": "-inf"}}


@pytest.mark.parametrize("torn", ["", '{"step": 3, "lo', "\u00e9"])
def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + torn)
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    with Metrics(path) as metrics:
        metrics.write(step=3)
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


@pytest.mark.parametrize(
    "torn", [b"\0" * 9, b'\0\0\0\0{"step": 3}', b'{"step": 3, "lo', b"[3]", b"\xff", b""]
)
def test_a_run_resumes_whose_metrics_a_power_cut_has_torn(tmp_path: Path, torn: bytes) -> None:
    path, whole = tmp_path / "metrics.jsonl", b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(whole + torn + b'\n{"step": 4}\n')
    assert last_step(path) == 2
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    cut_metrics(path, 9)
    assert path.read_bytes() == whole
    path.write_bytes(torn + b"\n")
    assert last_step(path) == 0
    with Metrics(path) as metrics:
        metrics.write(step=1)
    assert read_metrics(path) == [{"step": 1}]


def test_a_run_that_resumes_forgets_the_steps_beyond(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    cut_metrics(path, 3)
    assert not path.exists()
    for step, kept in ((9, 5), (3, 3), (3, 3), (0, 0)):
        if step == 9:
            path.write_text(
                "".join(f'{{"step": {n}, "loss": 1.5}}\n' for n in range(1, 6)) + '{"step": 6, "l'
            )
        inode = path.stat().st_ino
        cut_metrics(path, step)
        assert [line["step"] for line in read_metrics(path)] == list(range(1, kept + 1))
        assert path.stat().st_ino == inode
    path.write_text('{"note": 1}\n{"step": 1}\n{"note": 2}\n{"step": 2}\n{"note": 3}\n')
    cut_metrics(path, 1)
    assert read_metrics(path) == [{"note": 1}, {"step": 1}, {"note": 2}]
