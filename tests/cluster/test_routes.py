"""Which library multiplies fp32 matrices: the choice from what was measured."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.cluster.routes import GAIN, Route, fastest, gain, together, why


def routes(mkl: float, onednn: float, fp32: bool = True) -> tuple[Route, ...]:
    return Route("mkl", mkl, 3e-7, True), Route("onednn", onednn, 4e-7 if fp32 else 2e-3, fp32)


@pytest.mark.parametrize(
    ("by_rank", "taken", "said"),
    [
        ([routes(1e11, 2e11)], "onednn", "oneDNN, 2.00 times as fast as MKL (200 Gflop/s and 100 Gflop/s, "),
        ([routes(1e11, 1.04e11)], "mkl", "MKL, as oneDNN is not clearly faster"),
        ([routes(2e11, 1e11)], "mkl", "not clearly faster (100 Gflop/s and 200 Gflop/s, errors 4e-07 and 3e"),
        ([routes(1e11, 7e11, False)], "mkl", "oneDNN rounds to less than fp32 here"),
        ([routes(1e11, 2e11), routes(1e11, 7e11, False)], "mkl", "errors 2e-03"),  # one rank is enough
        ([routes(1e11, 2e11), routes(2e11, 1.6e11)], "onednn", "1.33 times"),  # the gain of one pays
        ([routes(1e11, 1.1e11), routes(1e10, 0.9e10)], "mkl", "not clearly"),  # the slow one counts more
    ],
)
def test_the_choice_and_its_reason(by_rank: Sequence[tuple[Route, ...]], taken: str, said: str) -> None:
    found = together(by_rank)
    assert fastest(found) == taken
    assert said in why(found)


@given(st.lists(st.tuples(st.floats(1e9, 1e12), st.floats(1e9, 1e12), st.booleans()), min_size=1, max_size=4))
def test_it_is_the_least_time_of_all_ranks_and_fp32_on_each(
    drawn: list[tuple[float, float, bool]],
) -> None:
    found = together([routes(*rates) for rates in drawn])
    times = [sum(1 / rate for rate in column) for column in list(zip(*drawn, strict=True))[:2]]
    assert gain(found, "onednn") == pytest.approx(times[0] / times[1])
    if abs(times[0] / times[1] - GAIN) > 1e-6:
        wanted = times[0] > GAIN * times[1] and all(fp32 for _, _, fp32 in drawn)
        assert (fastest(found) == "onednn") == wanted
