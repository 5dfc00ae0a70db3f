"""The diagnosis of a standstill, from records made up by hand."""

from __future__ import annotations

from mpipipe.cluster.flight import LINKS, Doing, Flight, Sign, diagnose


def flight(rank: int, what: str, *waits_for: int, at: str = "", since_s: float = 41.0) -> Flight:
    return Flight(rank, f"n{rank}", 100 + rank, Doing(7, what, waits_for, at), since_s, (), (), {})


def lines(*flights: Flight, start: int, signs: dict[int, Sign] | None = None) -> list[str]:
    return diagnose({f.rank: f for f in flights}, signs or {}, start, 41.0)


def test_the_waits_are_followed_to_the_rank_that_does_not_wait() -> None:
    records = [
        flight(0, "1B0", 1),
        flight(1, "2B0", 2),
        flight(2, "F of stage 2, micro-batch 5", at="mine.py:3 in forward"),
        flight(3, "2F5", 2),
    ]
    for start in range(4):  # whoever was the first to notice
        assert lines(*records, start=start) == [
            "rank 0 (n0) waits for 1B0 from rank 1, since 41 s",
            "rank 1 (n1) waits for 2B0 from rank 2, since 41 s",
            "rank 2 (n2) is in F of stage 2, micro-batch 5, since 41 s, at mine.py:3 in forward",
        ]


def test_of_a_long_chain_the_end_is_told() -> None:
    said = lines(
        *(flight(r, f"{r + 1}B0", r + 1) for r in range(40)), flight(40, "STEP of stage 40"), start=0
    )
    assert len(said) == LINKS
    assert said[-1].startswith("rank 40 (n40) is in STEP of stage 40")


def test_of_a_collective_the_one_who_has_not_come_is_blamed() -> None:
    norm = "the norm of the gradients"
    said = lines(flight(0, norm, 1, 2), flight(1, norm, 0, 2), flight(2, "STEP of stage 2"), start=0)
    assert said[0] == "rank 0 (n0) waits for the norm of the gradients from rank 2, since 41 s"
    assert said[1].startswith("rank 2 (n2) is in STEP of stage 2")
    assert "from rank 2" in lines(flight(0, norm, 1, 2), flight(1, norm, 0, 2), start=0)[0], (
        "it has no record"
    )
    said = lines(flight(0, norm, 1, 2), flight(1, norm, 0, 2), flight(2, "1F3", 1), start=0)
    assert "from rank 2" in said[0], "who waits for one rank is nearer to the cause than who waits for all"


def test_a_rank_that_does_not_answer_is_told_by_its_last_sign_of_life() -> None:
    sign = Sign(9, "n1", 101, Doing(7, "F of stage 1, micro-batch 2"))
    said = lines(flight(0, "1B0", 1), start=0, signs={1: sign})
    silent = "rank 1 (n1, pid 101) gives no sign of life since 41 s"
    assert said[1].startswith(f"{silent}, when it was in F of stage 1, micro-batch 2, step 7: ")
    assert lines(start=1)[0].startswith("rank 1 has given no sign of life: ")


def test_ranks_that_wait_for_each_other_do_not_make_it_endless() -> None:
    said = lines(flight(0, "1B0", 1), flight(1, "0F1", 0), start=0)
    assert said[-1] == "ranks 0 and 1 wait for each other: a message is lost, or the program is at fault"
    assert len(said) == 3
