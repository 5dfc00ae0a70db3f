"""`make setup OFFLINE=folder` takes what `make wheelhouse` has put there, and nothing else."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
WHEEL = "torch-2.13.0-py3-none-any.whl"
KIND = "Python 3.11 Linux x86_64"
CHOICES = {
    "PYTHON": "",
    "TORCH": "torch==2.13.0",
    "TORCH_INDEX": "the-index",
    "MPI": "pip",
    "MPICC": "mpicc",
    "CUDA": "0",
}


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder as of `make wheelhouse`, with one file."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / WHEEL).write_bytes(b"wheel")
    digest = hashlib.sha256(b"wheel").hexdigest()
    (folder / "SHA256SUMS").write_text(f"{digest}  {WHEEL}\n")
    (folder / "KIND").write_text(KIND + "\n")
    return folder


def set_up(folder: Path) -> subprocess.CompletedProcess[str]:
    """`.ci/setup` with a Python and a pip that only note how they are called, in pip.log."""
    venv = folder.parent / "venv"
    answer = f'case "$*" in *platform*) echo "{KIND}" ;; *downloads.py*) echo "$@" ;; esac\n'
    script(venv / "bin" / "python", answer)
    seen = "$PIP_FIND_LINKS|$PIP_NO_INDEX|$PIP_CONFIG_FILE|${PIP_INDEX_URL-no index}|$*"
    script(venv / "bin" / "pip", f'echo "{seen}" >>"{venv}/pip.log"\n')
    given = {"VENV": str(venv), "OFFLINE": str(folder), "CXX": "true", "PIP_INDEX_URL": "elsewhere"}
    env = {**os.environ, **CHOICES, **given}
    return subprocess.run(
        [".ci/setup"], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_pip_sees_the_folder_and_nothing_else(wheels: Path) -> None:
    done = set_up(wheels)
    assert done.returncode == 0, done.stderr
    lines = (wheels.parent / "venv" / "pip.log").read_text().splitlines()
    assert any("--editable" in line for line in lines)
    assert [line for line in lines if not line.startswith(f"{wheels}|1|/dev/null|no index|")] == []
    assert "the-index" not in done.stdout + "".join(lines)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "SHA256SUMS").unlink(), "Run make wheelhouse"),
        (
            lambda folder: (folder / WHEEL).write_bytes(b"whee"),
            "copy the folder again",
        ),
        (lambda folder: (folder / WHEEL).unlink(), "copy the folder again"),
        (
            lambda folder: (folder / "KIND").write_text("Python 3.12 Linux aarch64\n"),
            "Python 3.12 Linux aarch64",
        ),
    ],
    ids=["no list", "a damaged file", "a missing file", "another Python"],
)
def test_a_folder_that_cannot_serve_is_refused(wheels: Path, spoil: object, said: str) -> None:
    spoil(wheels)
    done = set_up(wheels)
    assert done.returncode == 1
    assert f"OFFLINE={wheels}" in done.stderr
    assert said in done.stderr
    assert not (wheels.parent / "venv" / "pip.log").exists()


@pytest.mark.full
def test_a_wheelhouse_sets_up_where_there_is_no_network(tmp_path: Path) -> None:
    """For real; the first half needs a package index, the second the right to forbid the network."""
    if not shutil.which("unshare") or subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        pytest.skip("needs the right to forbid the network (unshare -n)")
    env = {
        name: value for name, value in os.environ.items() if name not in ("VENV", "VIRTUAL_ENV", "PYTHONPATH")
    }
    files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(files, cwd=REPOSITORY, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        source, target = REPOSITORY / name, tmp_path / "clone" / name
        if source.exists():  # or removed, and git does not know yet
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)

    def run(*command: str) -> str:
        done = subprocess.run(
            command,
            cwd=tmp_path / "clone",
            env=env,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = run("make", "wheelhouse", f"WHEELHOUSE={tmp_path / 'wheels'}")
    assert f"make setup OFFLINE={tmp_path / 'wheels'}" in said.splitlines()[-1]
    assert "MPI: " in run("unshare", "-n", *said.splitlines()[-1].split())
    assert (tmp_path / "wheels" / "SHA256SUMS").exists()
    run(
        "unshare",
        "-n",
        ".venv/bin/python",
        "-m",
        "mpipipe.train",
        "examples/mlp.yaml",
        "train.steps=2",
        "sample.length=0",
    )
