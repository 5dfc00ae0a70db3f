from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_jobs import CONFIG, JOB_S, SLOW, TESTBED, sha_of

NODES = 3
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def slurm() -> Iterator[Callable[[], None]]:
    """Nodes that are set down when they have not answered for a few seconds. Called: brings back those that a
    test has killed."""

    def up() -> None:
        line = [TESTBED / "slurm-up", "-n", str(NODES), "--fast-fail", "5"]
        started = subprocess.run(line, capture_output=True, text=True, timeout=600)
        assert started.returncode == 0, f"slurm-up failed\n{started.stdout}\n{started.stderr}"

    try:
        up()
        yield up
    finally:
        subprocess.run([TESTBED / "slurm-down"], check=True, capture_output=True, timeout=120)


@pytest.fixture(scope="session")
def whole_sha(tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> str:
    """Of the weights that the training ends with under plain mpirun, where nobody disturbs it."""
    folder = prepared(tmp_path_factory.mktemp("whole"))
    plain = launch(2, "-m", "mpipipe.train", "config.yaml", "run.dir=run", cwd=folder, timeout_s=JOB_S)
    assert plain.returncode == 0, plain.stderr
    return sha_of(folder / "run")


@pytest.fixture
def kill(slurm: Callable[[], None]) -> Iterator[Callable[[str], None]]:
    """Ends a node as a power cut does; afterwards it is back."""

    def end(node: str) -> None:
        subprocess.run([TESTBED / "hosts-ctl", "--group", "slurm", "kill", node], check=True)

    yield end
    slurm()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the user works: not the repository, so that relative paths are put to the test. Steps take a
    while as long as the file `slow` is there."""
    return prepared(tmp_path)


def prepared(folder: Path) -> Path:
    (folder / "slow.py").write_text(SLOW)
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    return folder
