"""The page: complete, self-contained, and nothing in a run can break out of its text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from made_run import made_metrics, made_run

from mpipipe.planner import lower
from mpipipe.planner.schedules import build, in_copies
from mpipipe.report.page import page
from mpipipe.report.page.data import MOST_POINTS, _timeline, curves, in_script, page_data
from mpipipe.report.page.html import tag
from mpipipe.report.run import RunData, read_run
from mpipipe.values import Op, Timeline

EVIL = "</script></style><img src=x onerror=alert(1)>\"'&amp;\u2028"


class Parsed(HTMLParser):
    """Elements with their attributes, and the text inside each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in ("meta", "rect"):
            self._open.append(name)
            self.inside.setdefault(name, []).append("")

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop() == name

    def handle_data(self, text: str) -> None:
        for name in self._open:
            self.inside[name][-1] += text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return read_run(made_run(tmp_path_factory.mktemp("page") / "made"))


@pytest.mark.slow
def test_the_page_needs_nothing_else(run: RunData) -> None:
    text = page(run)
    elements = Parsed(text).elements
    assert not {name for name, _ in elements} & {"link", "img", "iframe", "object", "base", "form"}
    assert not [value for _, a in elements for key, value in a.items() if key in ("src", "href", "style")]
    assert not [key for _, a in elements for key in a if key.startswith("on")]
    assert not re.search(r"https?:|@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\b\s*\(", text)
    assert len(text) < 200_000


@pytest.mark.slow
def test_the_policy_allows_this_script_and_this_style_alone(run: RunData) -> None:
    parsed = Parsed(page(run))
    policy = next(
        a["content"] for _, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy"
    )
    (_, script), (style,) = parsed.inside["script"], parsed.inside["style"]
    hashes = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (script, style)]
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )


@pytest.mark.slow
def test_nothing_in_a_run_becomes_markup(run: RunData) -> None:
    assert run.plan is not None
    assert run.plan.costs is not None
    assert run.report is not None
    devices = tuple(replace(device, kind=EVIL) for device in run.plan.costs.cluster.devices)
    cluster = replace(run.plan.costs.cluster, devices=devices)
    plan = replace(
        run.plan,
        costs=replace(run.plan.costs, cluster=cluster),
        numerics=replace(run.plan.numerics, torch=EVIL, op_table={EVIL: EVIL}),
    )
    evil = replace(
        run,
        name=EVIL,
        config=f"run:\n  name: '{EVIL}'\n",
        plan=plan,
        report=replace(run.report, metrics={EVIL: 1.0}, stopped_by=EVIL, weights_sha256=EVIL),
        metrics=({"step": 1, "loss": 2.0, EVIL: 1.0},),
        notes=(EVIL,),
    )
    plain, parsed = Parsed(page(run)), Parsed(page(evil))
    assert "img" not in {name for name, _ in parsed.elements}
    assert len(parsed.inside["script"]) == 2
    assert not [a for _, a in parsed.elements if any(key.startswith("on") for key in a)]
    assert parsed.inside["script"][1] == plain.inside["script"][1]
    assert parsed.inside["h1"] == [EVIL]
    assert any(EVIL in text for text in parsed.inside["pre"])
    curve = json.loads(parsed.inside["script"][0])["curves"][-1]
    assert curve["title"] == EVIL


def test_text_is_escaped_by_construction() -> None:
    assert tag("td", "a < b", tag("b", "&"), class_="x", data_i=0, hidden=True, id=None) == (
        '<td class="x" data-i="0" hidden>a &lt; b<b>&amp;</b></td>'
    )
    assert tag("p", "x", title='"><') == '<p title="&quot;&gt;&lt;">x</p>'
    assert "</" not in in_script({"a": "</script>"})
    assert json.loads(in_script({"a": "</script>"})) == {"a": "</script>"}


def test_the_drawn_instructions_are_those_of_the_timelines(run: RunData) -> None:
    data = json.loads(in_script(page_data(run)))
    assert [t["name"] for t in data["timelines"]] == ["predicted", "measured"]
    for drawn in data["timelines"]:
        timeline = run.timelines[drawn["name"]]
        codes = data["programs"][drawn["program"]]
        for rank, columns in enumerate(drawn["ranks"]):
            ends = np.cumsum(np.array([columns["gap_ns"], columns["took_ns"]]).T.ravel()).reshape(-1, 2)
            assert ends / 1e9 == pytest.approx(timeline.times[rank], abs=2e-9)
            assert np.cumsum(columns["held_bytes"]).tolist() == timeline.memory_bytes[rank].tolist()
            assert codes[rank]["op"] == timeline.program.codes[rank][:, 0].tolist()
    assert set(data["bytes"].values()) == {1 << 20}
    assert len(data["resident"]["ranks"]) == 2
    assert data["words"][0].format(micro=3, stage=1) == "forward of micro-batch 3 on stage 1"


def test_what_was_begun_before_its_turn_is_in_its_place_in_the_page() -> None:
    """It looks for instructions by their ends, which ascend."""
    order = build("interleaved", 2, 2, 1)
    program = lower(in_copies([order] * 3, [[copy, copy] for copy in range(3)]), (), "per_use", 4)
    ops, n = program.codes[0][:, 0], len(program.codes[0])
    times = np.arange(2.0 * n).reshape(-1, 2)
    (early,) = np.flatnonzero(ops == Op.SEND_SHARD)[[-1]]
    times[early] = times[0, 1]
    timeline = Timeline(program, (times,) * 3, (np.zeros(n, np.int64),) * 3)
    (columns, *_) = _timeline("measured", timeline, 0)["ranks"]
    assert min(columns["gap_ns"] + columns["took_ns"]) >= 0
    ends = np.cumsum(np.array([columns["gap_ns"], columns["took_ns"]]).T.ravel()).reshape(-1, 2)
    others = np.arange(n) != early
    assert ends[others] / 1e9 == pytest.approx(times[others])
    assert ends[early].tolist() == [ends[early - 1, 1]] * 2


@pytest.mark.slow
def test_the_page_knows_every_kind_of_instruction(run: RunData) -> None:
    (kinds,) = re.findall(r"const OPS = (\[[^]]*\])", page(run))
    assert json.loads(kinds) == [op.name.partition("_")[0] for op in Op]


@pytest.mark.slow
def test_the_figures_are_those_of_the_summary(run: RunData) -> None:
    shown = " ".join(Parsed(page(run)).inside["dd"])
    report = run.report
    assert report is not None
    for figure in (report.step_s * 1e3, report.val_loss, report.final_loss, report.peak_bytes[0] / (1 << 20)):
        assert f"{figure:.4g}" in shown
    assert f"{100 * report.bubble:.1f} %" in shown
    assert f"{report.per_s:.0f} tokens/s" in shown


@pytest.mark.slow
def test_by_what_was_computed_is_told(run: RunData) -> None:
    assert run.report is not None
    report = replace(run.report, products="fp32 products: MKL", kernels="kernels: bias_gelu, as before")
    told = Parsed(page(replace(run, report=report))).inside["p"]
    assert {report.products, report.kernels} <= set(told)


def test_ranks_of_several_stages_are_counted_once(run: RunData) -> None:
    assert run.plan is not None
    cuts, ranks = ("blocks.2", "blocks.4", "blocks.6"), ((0,), (1,), (0,), (1,))
    plan = replace(run.plan, layout=replace(run.plan.layout, cuts=cuts, ranks=ranks), costs=None)
    parsed = Parsed(page(replace(run, plan=plan)))
    assert any("2 ranks x 1 thread" in text for text in parsed.inside["p"])
    peaks = [f"{peak / 2**20:.0f}" for peak in plan.prediction.peak_bytes]
    cells = parsed.inside["td"]
    assert cells[cells.index("blocks.4") + 1] == peaks[0]
    assert cells[cells.index("blocks.6") + 1] == peaks[1]


@pytest.mark.slow
def test_the_bars_of_a_rank_fill_its_row(run: RunData) -> None:
    boxes = [a for name, a in Parsed(page(run)).elements if name == "rect" and a["class"] != "compute_s"]
    rows = [a for name, a in Parsed(page(run)).elements if name == "rect" and a["class"] == "other_s"]
    assert len(rows) == 2
    assert all(float(a["x"] or 0) + float(a["width"] or 0) == pytest.approx(1000, abs=0.02) for a in rows)
    assert len(boxes) == 2 * 4


@pytest.mark.slow
def test_long_curves_are_means_of_steps_and_say_so(run: RunData) -> None:
    lines = made_metrics(10 * MOST_POINTS, 0.1)
    lines[0]["loss"] = float("nan")
    loss, *others = curves(lines)
    training, validation = loss["series"]
    assert [s["name"] for s in loss["series"]] == ["training", "validation"]
    assert len(training["x"]) == MOST_POINTS
    assert training["x"][:2] == [10, 20]
    assert training["y"][0] is None
    assert training["y"][1] == pytest.approx(np.mean([line["loss"] for line in lines[10:20]]), rel=1e-6)
    assert validation["x"][:2] == [20, 40]
    assert [c["title"] for c in others] == [
        "learning rate", "gradient norm", "seconds per step", "tokens per second", "validation accuracy",
    ]  # fmt: skip
    assert "each point the mean of 10 steps" in page(replace(run, metrics=tuple(lines)))


@pytest.mark.slow
def test_a_run_that_goes_on_has_a_page(tmp_path: Path) -> None:
    text = page(read_run(made_run(tmp_path / "going", ended=False)))
    assert "no summary.json" in text
    assert "predicted step" in text.lower()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.yaml").write_text("model: [")
    assert "no step has been written yet" in page(read_run(tmp_path / "bare"))
