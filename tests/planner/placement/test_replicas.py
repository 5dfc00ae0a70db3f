"""PipeDream's plan of stages and copies against trying every one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from mpipipe.errors import PlanError
from mpipipe.planner.placement import Layer, Profile, replicas, replicate


def random_profile(seed: int) -> tuple[Profile, int, float]:
    rng = random.Random(seed)
    n = rng.randint(1, 6)
    layers = tuple(
        Layer(f"node{v}", f"n{v}", rng.randint(0, 9), rng.randint(0, 5), rng.randint(0, 20)) for v in range(n)
    )
    edges = tuple((a, b) for b in range(n) for a in range(b) if rng.random() < 0.5)
    return Profile(layers, edges), rng.randint(1, 4), rng.choice([0.5, 2.0, 10.0])


def stage_s(
    profile: Profile, before: frozenset[int], after: frozenset[int], copies: int, rate: float
) -> float:
    """By the definition, in words of its own."""
    held = [profile.layers[v] for v in after - before]
    crossing = {a for a, b in profile.edges if a in before and b not in before}
    arrives = 2 * sum(profile.layers[a].activation_bytes for a in crossing) / rate
    exchanged = 4 * (copies - 1) / copies * sum(layer.parameter_bytes for layer in held) / rate
    return max(arrives, max(sum(layer.compute_s for layer in held), exchanged) / copies)


def ideals(profile: Profile) -> list[frozenset[int]]:
    n = len(profile.layers)
    sets = [frozenset(s) for size in range(n + 1) for s in itertools.combinations(range(n), size)]
    return [s for s in sets if all(a in s for a, b in profile.edges if b in s)]


def every_load_s(
    profile: Profile, found: list[frozenset[int]], begin: frozenset[int], left: int, rate: float
) -> Iterator[float]:
    if len(begin) == len(profile.layers):
        yield 0.0
        return
    for end in found:
        for copies in range(1, left + 1) if begin < end else ():
            here = stage_s(profile, begin, end, copies, rate)
            yield from (max(here, rest) for rest in every_load_s(profile, found, end, left - copies, rate))


@pytest.mark.parametrize("seed", range(40))
def test_is_the_best_of_all_stages_and_copies(seed: int) -> None:
    profile, n_devices, rate = random_profile(seed)
    found = replicate(profile, "it", n_devices, rate)
    assert found.load_s == pytest.approx(
        min(every_load_s(profile, ideals(profile), frozenset(), n_devices, rate))
    )
    assert found.gap == 0
    assert sum(stage.copies for stage in found.stages) <= n_devices
    before: frozenset[int] = frozenset()
    for stage in found.stages:
        after = before | set(stage.layers)
        assert stage.load_s == pytest.approx(stage_s(profile, before, after, stage.copies, rate))
        before = after
    assert sorted(before) == list(range(len(profile.layers)))


def test_many_ideals_are_planned_along_one_order_with_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        profile, n_devices, rate = random_profile(seed)
        exact = replicate(profile, "it", n_devices, rate)
        with monkeypatch.context() as m:
            m.setattr(replicas, "MOST_IDEALS", 0)
            found = replicate(profile, "it", n_devices, rate)
        assert found.bound_s <= exact.load_s <= found.load_s * (1 + 1e-12)


def test_dear_parameters_stay_on_one_device() -> None:
    """As VGG-16: convolutions with little to exchange, linear layers with little to compute."""
    layers = (
        *(Layer(f"c{i}", "conv", 0.1, 1e7 / (i + 1), 1e6) for i in range(6)),
        *(Layer(f"f{i}", "linear", 0.01, 1e5, 1e8) for i in range(3)),
    )
    profile = Profile(layers, tuple((v, v + 1) for v in range(8)))
    assert [s.copies for s in replicate(profile, "it", 16, 1e9).stages] == [15, 1]
    assert [s.copies for s in replicate(profile, "it", 16, 1e12).stages] == [16], "all, where links are fast"


def test_no_devices_are_refused() -> None:
    with pytest.raises(PlanError, match="it: --devices 0; give 1 at least"):
        replicate(random_profile(0)[0], "it", 0, 1.0)
