"""The page in a real browser: it draws, answers the hand, and says nothing on the console."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_run import made_run

from mpipipe.commands.report import main
from mpipipe.report.run import RunData, read_run

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]
ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1280,1000",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made_run(tmp_path_factory.mktemp("browser") / "made")
    assert main([str(folder), "--html"]) == 0
    return folder


@pytest.fixture(scope="module")
def run(made: Path) -> RunData:
    return read_run(made)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Any, made: Path) -> Iterator[Any]:
    """The page, drawn; afterwards the console must be empty."""
    open_page(browser, made / "report.html")
    yield browser
    assert browser.get_log("browser") == []


def open_page(browser: Any, path: Path) -> None:
    browser.get(path.as_uri())
    settle(browser)


def settle(browser: Any) -> None:
    """Until what was asked for has been drawn."""
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => arguments[0]()))")


def measured(browser: Any) -> Any:
    """The canvas of the measured step, in the middle of the window."""
    canvas = browser.find_element("css selector", "canvas[data-timeline='1']")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    return canvas


def point(browser: Any, canvas: Any, time_s: float, rank: int) -> None:
    """Moves the mouse to a time on a rank, while the whole step is shown."""
    left, row = (float(canvas.get_attribute(f"data-{name}")) for name in ("left", "row"))
    width, height = canvas.size["width"], canvas.size["height"]
    x = left + time_s * 1e3 / shown(browser)[1] * (width - left)
    offset = round(x - width / 2), round((rank + 0.5) * row - height / 2)
    ActionChains(browser, duration=0).move_to_element_with_offset(canvas, *offset).perform()
    settle(browser)


def shown(browser: Any) -> tuple[float, float]:
    """The visible range, ms."""
    words = browser.find_element("id", "range").text.split()
    return float(words[0]), float(words[3])


def wheel(browser: Any, canvas: Any, delta: int) -> None:
    browser.execute_script(
        "const box = arguments[0].getBoundingClientRect();"
        "arguments[0].dispatchEvent(new WheelEvent('wheel', {deltaY: arguments[1], bubbles: true, "
        "cancelable: true, clientX: box.x + box.width * 0.75, clientY: box.y + 5}));",
        canvas,
        delta,
    )
    settle(browser)


def test_pointing_at_a_box_tells_its_instruction(opened: Any, run: RunData) -> None:
    canvas, timeline = measured(opened), run.timelines["measured"]
    for rank, name in ((0, "0F2"), (1, "1B3"), (1, "1STEP")):
        span = next(span for span in timeline.spans(rank) if str(span.instr) == name)
        point(opened, canvas, (span.start_s + span.end_s) / 2, rank)
        kind = {"F": "forward of micro-batch 2 on stage 0", "B": "backward of micro-batch 3 on stage 1"}
        words = kind.get(name[1], "update of stage 1")
        took, start = (span.end_s - span.start_s) * 1e3, span.start_s * 1e3
        told = opened.find_element("id", "tip").text
        assert f"{words}, rank {rank}: {took:.1f} ms, from {start:.1f} ms" in told


def test_the_pointer_draws_anew_only_what_it_changes(opened: Any, run: RunData) -> None:
    """Each drawing asks its canvas for a context once."""
    canvas = measured(opened)
    first, other = (
        next(s for s in run.timelines["measured"].spans(0) if str(s.instr) == n) for n in ("0F0", "0B0")
    )
    point(opened, canvas, first.start_s + 0.3 * (first.end_s - first.start_s), 0)
    opened.execute_script(
        "window.drawn = []; const get = HTMLCanvasElement.prototype.getContext;"
        "HTMLCanvasElement.prototype.getContext = function (...args) {"
        "  window.drawn.push(this.id || 'step'); return get.apply(this, args); };"
    )
    point(opened, canvas, first.start_s + 0.7 * (first.end_s - first.start_s), 0)
    assert opened.execute_script("return window.drawn") == []
    point(opened, canvas, (other.start_s + other.end_s) / 2, 0)
    assert set(opened.execute_script("return window.drawn")) == {"step"}


def test_a_message_tells_its_peer_its_bytes_and_what_was_exposed(opened: Any, run: RunData) -> None:
    span = next(s for s in run.timelines["measured"].spans(1) if s.instr.op.name == "RECV_ACT")
    point(opened, measured(opened), (span.start_s + span.end_s) / 2, 1)
    text = opened.find_element("id", "tip").text
    assert "waiting for the activation of micro-batch 0 from stage 0 (rank 0), rank 1" in text
    assert "1.0 MiB" in text
    exposed = (span.end_s - run.timelines["measured"].spans(0)[0].end_s) * 1e3
    assert f"{exposed:.1f} ms of it exposed" in text


def test_wheel_drag_and_double_click_change_what_is_seen(opened: Any) -> None:
    canvas = measured(opened)
    whole = shown(opened)
    wheel(opened, canvas, -400)
    closer = shown(opened)
    assert closer[1] - closer[0] < 0.6 * (whole[1] - whole[0])
    share = (0.75 * canvas.size["width"] - 58) / (canvas.size["width"] - 58)
    under = [low + share * (high - low) for low, high in (whole, closer)]
    assert under[0] == pytest.approx(under[1], abs=0.5)  # what is under the pointer stays there
    drag = ActionChains(opened, duration=0).move_to_element(canvas).click_and_hold()
    drag.move_by_offset(-100, 0).release().perform()
    settle(opened)
    moved = shown(opened)
    assert moved[0] > closer[0]
    assert moved[1] - moved[0] == pytest.approx(closer[1] - closer[0], abs=0.3)
    ActionChains(opened).double_click(canvas).perform()
    settle(opened)
    assert shown(opened) == whole


def test_the_keys_do_what_the_mouse_does(opened: Any) -> None:
    canvas = measured(opened)
    whole = shown(opened)
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert "forward of micro-batch 0 on stage 0, rank 0" in opened.find_element("id", "tip").text
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert "sending the activation of micro-batch 0" in opened.find_element("id", "tip").text
    canvas.send_keys(Keys.ARROW_DOWN)
    assert "rank 1" in opened.find_element("id", "tip").text
    canvas.send_keys("+")
    settle(opened)
    assert shown(opened)[1] - shown(opened)[0] < whole[1] - whole[0]
    canvas.send_keys("0")
    settle(opened)
    assert shown(opened) == whole
    canvas.send_keys(Keys.ESCAPE)
    assert not opened.find_element("id", "tip").is_displayed()


def test_the_values_of_a_curve_are_told(opened: Any, run: RunData) -> None:
    canvas = opened.find_element("css selector", "canvas[data-curve='0']")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    canvas.send_keys(*[Keys.ARROW_RIGHT] * 40)
    lines = opened.find_element("id", "tip").text.splitlines()
    values = [run.metrics[39]["loss"], run.metrics[39]["val_loss"]]
    assert lines[0] == "step 40"
    assert [float(line.split()[1]) for line in lines[1:]] == pytest.approx(values, rel=1e-3)


def test_the_figures_are_those_of_summary_json(opened: Any, made: Path) -> None:
    summary = json.loads((made / "summary.json").read_text())
    cards = opened.find_element("class name", "cards").text
    assert f"{summary['step_s'] * 1e3:.4g} ms" in cards
    assert f"{summary['per_s']:.0f} tokens/s" in cards
    assert f"{summary['val_loss']:.4g}" in cards


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_drawing_has_ink_in_either_theme_and_fits_a_phone(opened: Any, made: Path, scheme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    phone = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    open_page(opened, made / "report.html")
    wide, colours = opened.execute_script(
        "const ink = (c) => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height)"
        ".data.buffer)).size;"
        "return [document.documentElement.scrollWidth, [...document.querySelectorAll('canvas')].map(ink)]"
    )
    paper = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert wide <= 400
    assert len(colours) == 10
    assert min(colours) > 5
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


def test_without_scripts_the_run_is_there_as_text(opened: Any, made: Path) -> None:
    opened.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    opened.get((made / "report.html").as_uri())
    text = opened.find_element("tag name", "noscript").text
    opened.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "need JavaScript" in text
    assert "by rank, predicted | measured" in text
    assert "r1 |" in text


def test_a_run_that_goes_on_and_many_ranks_draw_too(browser: Any, tmp_path: Path) -> None:
    for name, ranks, ended in (("going", 2, False), ("alone", 1, True), ("many", 26, True)):
        folder = made_run(tmp_path / name, n_ranks=ranks, n_micro=8, steps=5, ended=ended)
        assert main([str(folder), "--html"]) == 0
        open_page(browser, folder / "report.html")
        assert browser.get_log("browser") == []
        assert len(browser.find_elements("css selector", "canvas[data-timeline]")) == 1 + ended
