"""The run folder: its own each time, the newest findable, the configuration inside."""

from __future__ import annotations

import errno
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mpipipe.config import Config, load, parse
from mpipipe.errors import ConfigError
from mpipipe.state.rundir import create, forget, make_latest, renew, reopen, run_name

NOON = datetime(2026, 1, 2, 12, 0, 5, tzinfo=UTC)


def test_default_folder_is_named_by_time_and_run_and_latest_points_at_it_once_it_trains(
    tmp_path: Path,
) -> None:
    config = parse("run: {name: my job}")
    folder = create(config, tmp_path, NOON)
    assert folder == tmp_path / "20260102-120005-my-job"
    assert load(folder / "config.yaml") == config
    make_latest(config, folder)
    assert os.readlink(tmp_path / "latest") == folder.name
    second = create(config, tmp_path, NOON)
    assert second.name == folder.name + "-2"
    assert (tmp_path / "latest").resolve() == folder.resolve(), "a start that fails hides no run"
    make_latest(config, second)
    assert (tmp_path / "latest").resolve() == second.resolve()
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder.name, second.name, "latest"]


@pytest.mark.parametrize(
    ("more", "error", "stays"),
    [
        ((), "no such model", False),
        (("train.log", "corpus-1a.bin", "flight/rank-12.alive"), "no such model", False),
        (("source-1/corpus-1a.bin",), "no such model", False),
        (("train.log",), "runs/one/corpus-1a.bin: holds 3 tokens", True),
        (("metrics.jsonl",), "", True),
        (("plan.json",), "", True),
        (("flight/diagnosis.txt",), "", True),
        (("notes/train.log",), "", True),
    ],
)
def test_of_a_start_that_failed_the_folder_stays_where_there_is_more_in_it_or_the_error_names_it(
    tmp_path: Path, more: tuple[str, ...], error: str, stays: bool
) -> None:
    folder = create(parse("", overrides=[f"run.dir={tmp_path / 'runs' / 'one'}"]))
    for name in more:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    forget(folder, ConfigError(error.replace("runs/one", str(folder))))
    assert folder.exists() == stays
    assert not stays or all((folder / name).exists() for name in ("config.yaml", *more))
    assert folder.parent.exists()


def test_of_a_folder_that_cannot_be_removed_the_configuration_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, which keeps files that other ranks have open."""
    folder, rmdir = create(parse(""), tmp_path), os.rmdir
    (folder / "flight").mkdir()
    for name in ("flight/rank-1.alive", "train.log"):
        (folder / name).touch()

    def busy(path: Any, **rest: Any) -> None:
        if Path(path).name == "flight":
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        rmdir(path, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        forget(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "flight"]
    forget(folder)
    assert not folder.exists()


def test_a_named_folder_is_used_once(tmp_path: Path) -> None:
    config = parse("", overrides=[f"run.dir={tmp_path / 'a' / 'b'}"])
    assert create(config, tmp_path / "runs") == tmp_path / "a" / "b"
    assert create(config, tmp_path / "runs") == tmp_path / "a" / "b", (
        "a run that failed before its first step"
    )
    (tmp_path / "a" / "b" / "metrics.jsonl").touch()
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError, match="holds an earlier run"):
        create(config, tmp_path / "runs")


@pytest.mark.parametrize(
    "given", [b"# mine\ntrain: {steps: 5}\n", b"train: {epochs: 5}\n", b"run: {name: caf\xe9}\n", b""]
)
def test_a_config_of_the_user_is_not_written_over(tmp_path: Path, given: bytes) -> None:
    """Such as the very file that is given on the command line."""
    path = tmp_path / "config.yaml"
    path.write_bytes(given)
    config = parse("", overrides=[f"run.dir={tmp_path}"])
    with pytest.raises(
        ConfigError, match=rf"run\.dir = '{tmp_path}': {path} is not of a run.*or rename that file"
    ):
        create(config)
    assert path.read_bytes() == given
    path.rename(tmp_path / "mine.yaml")
    assert create(config) == tmp_path
    other = parse("", overrides=[f"run.dir={tmp_path}", "train.steps=5"])
    assert load(create(other) / "config.yaml") == other, "that of a start that has failed is"


def test_a_place_that_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file.*name a folder of yours"):
        create(parse("", overrides=[f"run.dir={tmp_path / 'file'}"]))
    with pytest.raises(ConfigError, match="file"):
        create(parse(""), tmp_path / "file")


def test_names_are_safe_file_names() -> None:
    names = {"../../evil": "evil", "a b/c": "a-b-c", "...": "run", "v1.2_x": "v1.2_x"}
    assert {name: run_name(parse("run: {}", overrides=[f"run.name='{name}'"])) for name in names} == names
    assert run_name(parse("")) == "gpt"


def test_the_run_to_continue_is_the_named_or_the_latest_one(tmp_path: Path) -> None:
    base = tmp_path / "runs"
    assert reopen(parse(""), base) is None
    first, second = (create(parse(""), base, NOON) for _ in range(2))
    assert reopen(parse(""), base) is None
    make_latest(parse(""), second)
    assert reopen(parse(""), base) == second
    assert reopen(parse("", overrides=[f"run.dir={first}"]), base) == first
    assert reopen(parse("", overrides=[f"run.dir={tmp_path / 'none'}"]), base) is None
    (second / "config.yaml").unlink()
    assert reopen(parse(""), base) is None


def test_the_latest_run_is_not_continued_as_one_of_another_model(tmp_path: Path) -> None:
    mlp, gpt = parse("", overrides=["model.name=mlp", "data.name=synthetic"]), parse("")
    latest = create(mlp, tmp_path, NOON)
    make_latest(mlp, latest)
    with pytest.raises(
        ConfigError, match=f"{latest}, is one of the model mlp, not of gpt: .* resume, or run"
    ):
        reopen(gpt, tmp_path)
    ours = create(parse("", overrides=["run.name=exp"]), tmp_path, NOON)
    with pytest.raises(ConfigError, match=f"resume, run.dir={ours}, or run.dir={latest} if it is"):
        reopen(gpt, tmp_path)
    assert reopen(parse("", overrides=[f"run.dir={latest}"]), tmp_path) == latest
    (latest / "config.yaml").write_text("of: another version")
    assert reopen(gpt, tmp_path) == latest


def test_settings_of_a_run_that_goes_on_replace_the_earlier_ones_which_stay(tmp_path: Path) -> None:
    def config(steps: int) -> Config:
        return parse("", overrides=[f"run.dir={tmp_path / 'a'}", f"train.steps={steps}"])

    folder = create(config(10), tmp_path)
    renew(folder, config(10), 5)
    assert [p.name for p in folder.iterdir()] == ["config.yaml"]
    renew(folder, config(20), 5)
    renew(folder, config(30), 5)  # again from step 5: nothing was kept of what 20 did
    renew(folder, config(40), 25)
    found = {p.name: load(p).train.steps for p in folder.iterdir()}
    assert found == {"config.yaml": 40, "config.before-step-5.yaml": 10, "config.before-step-25.yaml": 30}
    (folder / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"config.yaml: cannot be .*No such file") as caught:
        renew(folder, config(50), 30)
    assert caught.value.kind == "error"


def test_settings_that_cannot_be_written_just_now_may_be_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: Path, text: str) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    config = parse("", overrides=[f"run.dir={tmp_path / 'a'}"])
    folder = create(config, tmp_path)
    monkeypatch.setattr("mpipipe.state.rundir.write_text", stale)
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        renew(folder, parse("", overrides=[f"run.dir={folder}", "train.steps=9"]), 5)
    assert caught.value.kind == "failed"
