"""A small sample of `make bench-survive`."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY))  # the benchmarks are no part of the package

from benchmarks import survive  # noqa: E402

pytestmark = [pytest.mark.jobs, pytest.mark.full]  # test_survival.py has a kill in each place, too


class Chosen(random.Random):
    """The first choices are given."""

    def __init__(self, *choices: object) -> None:
        super().__init__(0)
        self.choices = list(choices)

    def choice(self, seq):  # type: ignore[no-untyped-def]
        return self.choices.pop(0) if self.choices else super().choice(seq)


@pytest.mark.parametrize("places", [("save",), ("STEP", "save")])
def test_kills_inside_step_and_a_save_leave_the_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: tuple[str, ...]
) -> None:
    chosen = Chosen(*(word for place in places for word in (place, signal.SIGKILL)))
    monkeypatch.setattr(survive.random, "Random", lambda seed: chosen)
    monkeypatch.setattr(survive, "STEPS", 16)
    monkeypatch.setattr(survive, "CONFIG", survive.CONFIG.replace("steps: 60", "steps: 16"))
    way = survive.WAYS["restart"]
    tally = survive.survive(tmp_path, kills=len(places), ranks=2, way=way)
    assert (tally.kills, tally.hangs, tally.same_bits) == (len(places), 0, True)
    assert dict(tally.where) == dict.fromkeys(places, 1)
    assert max(tally.replayed) <= way.k
