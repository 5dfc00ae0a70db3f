"""Each file of this folder runs in a process of its own, on the emulated device (tests/emulated_device.py):
it is there before the first backward, and no other test sees an accelerator.

A test written here does nothing for it: "emulated:0" and "emulated:1" are devices in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import emulated_device
import pytest

REPORTS = "MPIPIPE_EMULATED_REPORTS"  # in the process of a file: where to write a line for each report
SECONDS = 600.0


@pytest.fixture(autouse=True, scope="session")
def emulated() -> Any:
    """The module of the device, as torch.cuda is that of GPUs."""
    lacking = emulated_device.missing()
    if lacking is not None:
        pytest.skip(f"the emulated device cannot be built: {lacking}")
    return emulated_device.register()


@pytest.fixture(autouse=True)
def _first_device(emulated: Any) -> Iterator[None]:
    yield
    emulated.set_device(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if REPORTS in os.environ or item.path.parent != Path(__file__).parent:  # it is asked about every test
        return None
    chosen = tuple(other.nodeid for other in item.session.items if other.path == item.path)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for data in _reports(item.config.rootpath, chosen)[item.nodeid]:
        if isinstance(data["longrepr"], list):
            data = data | {"longrepr": tuple(data["longrepr"])}  # of a skip, as pytest reads it
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report: Any = yield
    if REPORTS in os.environ:
        data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
        with Path(os.environ[REPORTS]).open("a") as file:
            print(json.dumps(data), file=file)
    return report


@cache
def _reports(root: Path, tests: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """What pytest in a process of its own reports of each of these tests; a failure where the process died
    before it was done."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "reports"
        lines.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(
            command, cwd=root, env={**os.environ, REPORTS: str(lines)}, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
        found: dict[str, list[dict[str, Any]]] = {test: [] for test in tests}
        for line in lines.read_text().splitlines():
            data = json.loads(line)
            found[data["nodeid"]].append(data)
    for test, reports in found.items():
        if not reports or reports[-1]["when"] != "teardown":
            text = f"the process of this test ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
            found[test] = [_failure(test, text)]
    return found


def _failure(test: str, text: str) -> dict[str, Any]:
    report = pytest.TestReport(test, (test.split("::")[0], None, test), {}, "failed", text, "call")
    return {**report._to_json(), "$report_type": "TestReport"}
