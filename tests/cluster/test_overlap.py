"""Who moves messages on while ranks compute: the choice and its words; measured in tests/mpi/test_comm.py."""

from __future__ import annotations

import pytest

from mpipipe.cluster.crossing import Crossed
from mpipipe.cluster.local import run_local
from mpipipe.cluster.overlap import GAIN, Felt, Overlap, choose, why


def overlap(*felt: tuple[float, float]) -> Overlap:
    levels = ("node", "switch")
    return Overlap(
        tuple(Felt(level, 1 << 20, 0.009, a, b) for level, (a, b) in zip(levels, felt, strict=False))
    )


@pytest.mark.parametrize(
    ("felt", "helper"),
    [
        ([], False),
        ([(0.001, 0.018)], True),
        ([(0.001, 0.001 * GAIN)], False),  # noise
        ([(0.0, 0.0)], False),
        ([(0.0003, 0.0001), (0.001, 0.018)], True),  # one process, one choice: what is saved counts
        ([(0.002, 0.0001), (0.001, 0.002)], False),
    ],
)
def test_the_helper_works_where_it_saves_time_over_all_levels(
    felt: list[tuple[float, float]], helper: bool
) -> None:
    assert overlap(*felt).helper is helper


def test_the_choice_is_told_with_its_figures() -> None:
    assert why(Overlap(()), "Open MPI 5.0.11") == ""
    assert why(overlap((0.001, 0.018)), "Open MPI 5.0.11") == (
        "messages move on by a helper thread: within a node a message of 1024 KiB, 9 ms long, costs 1 ms "
        "with a helper thread, 18 ms without"
    )
    settings = "Open MPI 5.0.11 OMPI_MCA_btl=^ofi OMPI_MCA_btl_tcp_progress_thread={}"
    for value, who in (
        ("1", "by the library (OMPI_MCA_btl_tcp_progress_thread=1)"),
        ("0", "between instructions"),
    ):
        assert why(overlap((0.1, 0.1)), settings.format(value)).startswith(f"messages move on {who}: ")


def test_how_messages_cross_is_told_beside_it() -> None:
    felt = overlap((0.001, 0.018)).felt
    for parts_s, how in ((0.033, "in parts"), (0.043, "whole")):
        crossed = Overlap(felt, (Crossed(1 << 18, 0.044, parts_s),))
        assert crossed.parts is (how == "in parts")
        assert why(crossed, "").endswith(
            f"18 ms without; between nodes they go {how}: two of 256 KiB that cross take "
            f"{parts_s * 1e3:.0f} ms in parts, 44 ms whole"
        )


def test_where_no_helper_is_allowed_nothing_is_measured() -> None:
    known = {"": overlap((0.001, 0.018))}
    assert run_local(2, lambda comm: choose(comm, known)) == [("", Overlap(()))] * 2
