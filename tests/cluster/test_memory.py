"""What is resident is seen at once, and nothing fails where the system does not say."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from mpipipe.cluster import memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_a_sample_sees_what_was_written_to() -> None:
    resident = memory.PeakMemory()
    before = resident.sample()
    held = np.ones(64 << 20, np.uint8)  # larger than the allocator keeps
    assert resident.sample() - before >= held.nbytes - (1 << 20)
    del held
    assert resident.sample() - before < 32 << 20


def test_without_a_statm_it_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_STATM", "/nowhere/statm")
    assert memory.PeakMemory().sample() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_mapped_file_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(64 << 20))
    resident = memory.PeakMemory()
    before, peak = resident.sample(), resident.nbytes
    data = np.memmap(path, np.uint8, "r")
    assert int(data.sum()) == 0
    assert resident.sample() - before < 8 << 20
    assert resident.nbytes - peak < 8 << 20


@pytest.mark.skipif(not memory._restart_peak(), reason="the system cannot forget the highest so far")
def test_growth_is_what_the_work_holds_and_not_what_was_freed_before() -> None:
    earlier = np.ones(64 << 20, np.uint8)
    del earlier
    assert memory.growth_bytes(lambda: np.ones(32 << 20, np.uint8)) >= 31 << 20
    assert memory.growth_bytes(lambda: None) < 16 << 20
