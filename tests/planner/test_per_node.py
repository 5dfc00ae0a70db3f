"""Ways to share out the cores of a node, and the best of them."""

from __future__ import annotations

import pytest

from mpipipe.planner.curve import Curve, Level
from mpipipe.planner.per_node import Split, best_split, splits


@pytest.mark.parametrize(
    ("cores", "domains", "found"),
    [
        (96, 6, [(1, 96), (6, 16), (12, 8), (24, 4), (48, 2), (96, 1)]),
        (8, 1, [(1, 8), (2, 4), (4, 2), (8, 1)]),
        (12, 4, [(1, 12), (4, 3)]),
        (7, 2, [(1, 7), (2, 3)]),
        (1, 1, [(1, 1)]),
        (2, 4, [(1, 2), (2, 1)]),
    ],
)
def test_domains_are_halved_and_all_cores_used(
    cores: int, domains: int, found: list[tuple[int, int]]
) -> None:
    assert splits(cores, domains) == [Split(*pair) for pair in found]


def curve(per_node: int, *steps: float) -> Curve:
    """On 1, 2, 4 ... nodes; the last is the knee."""
    levels = tuple(Level(per_node << i, 1 << i, s, 1.0 / s, 1.0, 0.0, 0, 0.0) for i, s in enumerate(steps))
    return Curve(levels, (), 1.0, False, levels[-1].ranks, "")


def test_the_best_knee_is_that_of_samples_per_node_and_not_per_rank() -> None:
    one, eight = Split(1, 8), Split(8, 1)
    assert best_split({one: curve(1, 1.0), eight: curve(8, 0.9)}) == eight
    assert best_split({one: curve(1, 1.0), eight: curve(8, 1.1)}) == one
    assert best_split({one: curve(1, 1.0), eight: curve(8, 1.0)}) == one, "of equal ones the fewest ranks"
    assert best_split({one: curve(1, 1.0, 0.6), eight: curve(8, 0.9)}) == one, "two nodes are worth it"
    assert best_split({one: curve(1, 1.0, 0.8), eight: curve(8, 0.9)}) == eight, "two nodes are not"
