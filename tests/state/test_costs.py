"""The cache of costs: found again, bounded, and never in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpipipe.cluster.crossing import Crossed
from mpipipe.cluster.overlap import Felt, Overlap
from mpipipe.cluster.routes import Route
from mpipipe.graph.pieces import Sample
from mpipipe.runtime.costing import Updates
from mpipipe.state import costs
from mpipipe.state.costs import CostCache, Kept

ONE, TWO = Sample(0.1, 0.2, 0.3, 0.01, 16, 8, (0, 1), ()), Sample(1 / 3, 0.0, 0.0, 0.0, 0, 0, (), (2,))


def cache(folder: Path | None, kind: str = "a processor") -> tuple[CostCache, list[str]]:
    said: list[str] = []
    return CostCache(folder, kind, said.append), said


def test_what_was_written_is_read_by_the_same_kind_of_machine(tmp_path: Path) -> None:
    first, said = cache(tmp_path / "new" / "folder")
    assert first.read().samples == {}
    first.write(Kept(samples={"a": ONE}))
    first.write(Kept(samples={"b": TWO}))
    assert cache(tmp_path / "new" / "folder")[0].read().samples == {"a": ONE, "b": TWO}
    assert cache(tmp_path / "new" / "folder", "another")[0].read().samples == {}
    assert said == []
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 1, "nothing half-written stays"


def test_routes_are_kept_beside_them(tmp_path: Path) -> None:
    found = (Route("mkl", 1e11, 3e-7, True), Route("onednn", 2e11, 4e-7, True))
    kept, _ = cache(tmp_path)
    kept.write(Kept(samples={"a": ONE}))
    kept.write(Kept(routes={"few": (), "model": found}))
    kept.write(Kept(samples={"b": TWO}))
    again, said = cache(tmp_path)
    assert again.read().samples == {"a": ONE, "b": TWO}
    assert again.read().routes == {"few": (), "model": found}
    (path,) = tmp_path.iterdir()
    old = {"kind": "a processor", "samples": json.loads(path.read_text())["samples"]}  # before there were any
    path.write_text(json.dumps(old))
    assert cache(tmp_path)[0].read() == Kept("a processor", {"a": ONE, "b": TWO})
    assert said == []


def test_what_an_update_takes_is_kept_beside_them(tmp_path: Path) -> None:
    found = Updates(1e-9, 1 / 3, 2e-6)
    kept, _ = cache(tmp_path)
    kept.write(Kept(samples={"a": ONE}, updates={"adamw": found}))
    kept.write(Kept(samples={"b": TWO}))
    assert cache(tmp_path)[0].read().updates == {"adamw": found}


def test_the_least_lately_used_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MOST", 2)
    kept, _ = cache(tmp_path)
    for name in ("a", "b", "a", "c"):
        kept.write(Kept(samples={name: ONE}))
    assert list(kept.read().samples) == ["a", "c"]


def test_how_messages_move_is_kept_beside_them(tmp_path: Path) -> None:
    felt, crossed = (Felt("node", 1 << 20, 1e-4, 0.0, 1 / 3),), (Crossed(1 << 18, 0.04, 1 / 3),)
    found, (kept, said) = Overlap(felt, crossed), cache(tmp_path)
    kept.write(Kept(overlaps={"a job": found}))
    kept.write(Kept(samples={"a": ONE}))
    assert (cache(tmp_path)[0].read().overlaps, said) == ({"a job": found}, [])


@pytest.mark.parametrize("text", ["", "{", '{"kind": "k", "samples": {"a": 1}}', "\x00\xff"])
def test_a_damaged_file_is_told_of_and_made_anew(tmp_path: Path, text: str) -> None:
    kept, said = cache(tmp_path)
    kept.write(Kept(samples={"a": ONE}))
    (path,) = tmp_path.iterdir()
    path.write_bytes(text.encode("latin-1"))
    assert kept.read().samples == {}
    assert [str(path) in line for line in said] == [True]
    kept.write(Kept(samples={"b": TWO}))
    assert kept.read().samples == {"b": TWO}
    assert len(said) == 1


def test_without_a_place_nothing_is_kept_and_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file", Path("/proc/nowhere")):  # no home, no folder, not writable
        kept, said = cache(folder)
        kept.write(Kept(samples={"a": ONE}))
        assert kept.read().samples == {}
        assert said == []


def test_of_a_busy_machine_only_what_decides_bits_is_kept(tmp_path: Path) -> None:
    cache(tmp_path)[0].write(Kept(samples={"a": ONE}))
    kept, table = CostCache(tmp_path, "a processor", print, quiet=False), {"model": {"norm 8": "torch"}}
    kept.write(Kept(samples={"b": TWO}, tables=table))
    assert (kept.read().samples, kept.read().tables) == ({"a": ONE}, table)
