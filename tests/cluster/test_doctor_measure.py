"""The doctor's measurements, on ranks that are threads; and its end when one does not answer."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mpipipe.cluster import calibrate
from mpipipe.cluster.doctor import copying, files, transport
from mpipipe.cluster.doctor.facts import Files
from mpipipe.cluster.local import run_local

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "BUDGET_S", 0.001)
    monkeypatch.setattr(copying, "BUDGET_S", 0.0)
    monkeypatch.setattr(copying, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(files, "PATIENCE_S", 0.0)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test alone has its temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.slow
def test_links_are_measured_by_one_rank_of_each_pair() -> None:
    found = run_local(5, transport.measure, node_of_rank=(0, 0, 1, 1, 1))
    assert [[(link.level, link.peer) for link in links] for links in found] == [
        [("node", 1), ("switch", 2)], [], [("node", 3)], [], [],
    ]  # fmt: skip
    for link in (link for links in found for link in links):
        assert link.nbytes == transport.LENGTHS
        assert len(link.seconds) == len(link.nbytes)
        assert all(s > 0 for s in link.seconds)
        assert 0.0 <= link.hidden <= 1.0
        assert link.bytes_per_s() == max(
            n / s for n, s in zip(link.nbytes[2:], link.seconds[2:], strict=True)
        )


def test_one_rank_has_no_links() -> None:
    assert run_local(1, transport.measure) == [()]


def test_the_first_rank_of_each_node_also_copies_alone() -> None:
    found = run_local(3, copying.measure, node_of_rank=(0, 0, 1))
    assert all(together > 0 for together, _ in found)
    assert [alone is None for _, alone in found] == [False, True, False]


def test_a_good_folder_is_seen_by_all_and_left_as_it_was(tmp_path: Path, temporary: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    found = run_local(3, lambda comm: files.examine(comm, folder / "runs" / "deep"), node_of_rank=(0, 1, 1))
    assert [(f.folder, f.temporary, f.failed, f.seen, f.temporary_seen) for f in found] == [
        (str(folder), str(temporary), (), True, True)
    ] * 3
    assert all(f.free_bytes > 0 for f in found)
    assert (list(folder.iterdir()), list(temporary.iterdir())) == ([], [])


def examine(folder: Path) -> Files:
    (found,) = run_local(1, lambda comm: files.examine(comm, folder))
    return found


def test_what_a_file_system_cannot_do_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert examine(tmp_path).failed == tuple(
        (str(tmp_path), f"{what}: Operation not supported")
        for what in ("a symbolic link", "fsync of a file", "fsync of a folder", "a lock")
    )
    assert list(tmp_path.glob(".*")) == []


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    found = examine(tmp_path)
    assert found.failed == ((str(tmp_path), "writing: Permission denied"),)
    assert not found.seen


def test_temporary_files_have_faults_of_their_own(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary.rmdir()
    found = examine(tmp_path)
    assert found.failed == ((str(temporary), "writing: No such file or directory"),)
    assert found.seen

    def refuse() -> str:
        raise FileNotFoundError(2, "No usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    found = examine(tmp_path)
    assert found.failed == (("the folder for temporary files", "No usable temporary directory"),)
    assert (found.seen, found.temporary) == (True, "")


def test_what_another_node_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sees = files._sees
    monkeypatch.setattr(files, "_sees", lambda path: path.parts[-3] == "temporary" and sees(path))
    found = examine(tmp_path)
    assert (found.failed, found.seen, found.temporary_seen) == ((), False, True)


HANGS = """
import sys, time
from mpipipe.cluster.doctor.watch import Watch
watch = Watch(float(sys.argv[1]), lambda doing: print("stuck in", doing))
watch.doing = "files"
time.sleep(float(sys.argv[2]))
watch.close()
"""


@pytest.mark.parametrize(
    ("limit_s", "works_s", "ends"), [("0.05", "60", (1, "stuck in files\n")), ("60", "0", (0, ""))]
)
def test_the_watch_ends_what_hangs_and_nothing_else(
    limit_s: str, works_s: str, ends: tuple[int, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS, limit_s, works_s],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == ends, done.stderr


FAILS = """
import time
from mpipipe.cluster.doctor.watch import Watch
watch = Watch(0.05, lambda doing: print("stuck in", doing + 1))
time.sleep(60)
"""


def test_a_watch_that_cannot_speak_says_why() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILS], cwd=REPOSITORY, capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "TypeError: can only concatenate str" in done.stderr
