"""The line through what messages took: found again from made-up times, also where some were disturbed."""

from __future__ import annotations

import numpy as np
import pytest

from mpipipe.cluster.fit import fit_line
from mpipipe.cluster.links import LENGTHS, SWEEPS

TRUTHS = [(2e-6, 9e9), (3e-5, 1.2e8), (1e-6, 5e10)]


def times(latency_s: float, bytes_per_s: float, noise: float, disturbed: float, seed: int):
    """As sweeps of four pairs see them; disturbed: the share of those that took 2 to 50 times as long."""
    random = np.random.default_rng(seed)
    nbytes = np.tile(LENGTHS, 4 * SWEEPS).astype(float)
    seconds = (latency_s + nbytes / bytes_per_s) * random.lognormal(0.0, noise, len(nbytes))
    hit = random.permutation(len(nbytes))[: int(disturbed * len(nbytes))]
    seconds[hit] *= random.uniform(2, 50, len(hit))
    return nbytes, seconds


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), TRUTHS)
def test_an_exact_line_is_found(latency_s, bytes_per_s):
    line = fit_line(*times(latency_s, bytes_per_s, 0.0, 0.0, 0))
    assert line.latency_s == pytest.approx(latency_s, rel=1e-4)
    assert line.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-4)
    assert line.residual < 1e-4
    assert line.seconds(1 << 20) == pytest.approx(latency_s + (1 << 20) / bytes_per_s, rel=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("latency_s", "bytes_per_s"), TRUTHS)
def test_outliers_move_it_little(latency_s, bytes_per_s, seed):
    nbytes, seconds = times(latency_s, bytes_per_s, 0.03, 0.2, seed)
    line = fit_line(nbytes, seconds)
    assert line.latency_s == pytest.approx(latency_s, rel=0.1)
    assert line.bytes_per_s == pytest.approx(bytes_per_s, rel=0.1)
    assert line.residual < 0.1
    slope, start = np.polyfit(nbytes, seconds, 1)  # what least squares would say
    assert abs(1 / slope / bytes_per_s - 1) > 0.1 or abs(start / latency_s - 1) > 0.1


def test_times_that_no_line_fits_have_a_residual():
    nbytes = np.array([8, 512, 1 << 15, 1 << 20] * 3, float)
    assert fit_line(nbytes, np.array([1e-6, 1e-3, 1e-6, 1e-3] * 3)).residual > 0.5


def test_noise_that_turns_the_lengths_round_still_gives_a_link():
    line = fit_line([8.0, 1024.0], [2e-6, 1e-6])
    assert line.latency_s > 0
    assert np.isfinite(line.bytes_per_s)
