"""Uniform, normal, integer and coin draws: their definition on the words, and their distribution."""

import math

import numpy as np
import pytest
import torch

from mpipipe.ops import (
    bernoulli,
    bernoulli_like,
    integers,
    normal,
    normal_like,
    philox_words,
    stream_key,
    uniform,
    uniform_like,
)

KEY = stream_key(5, "noise/rand.0")
N = 20_000


def words(n: int) -> np.ndarray:
    return philox_words(KEY, 1, 2, n)


def test_uniform_is_the_top_of_the_word():
    expected = (words(15) >> 8).astype(np.float32) * np.float32(2**-24)
    assert torch.equal(uniform((3, 5), KEY, 1, 2), torch.from_numpy(expected).view(3, 5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_never_reaches_one(dtype):
    u = uniform((N,), KEY, 1, 2, dtype=dtype)
    assert u.dtype == dtype
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.double().mean().item() - 0.5) < 0.01


@pytest.mark.slow
def test_distributions():
    """Kolmogorov-Smirnov at a level that a right stream fails once in a million, for a fixed stream."""
    from scipy import stats  # here: it takes a while

    assert stats.kstest(uniform((N,), KEY, 1, 2).numpy(), "uniform").pvalue > 1e-6
    assert stats.kstest(normal((N,), KEY, 1, 2).numpy(), "norm").pvalue > 1e-6
    z = normal((N,), KEY, 1, 2, dtype=torch.float64).numpy()
    assert abs(np.corrcoef(z[0::2], z[1::2])[0, 1]) < 5 / math.sqrt(N / 2)  # the two of a pair


@pytest.mark.parametrize("n", [1, 2, 7])
def test_normal_is_box_muller(n):
    w = words(n + 1).astype(np.float64)
    expected = [
        math.sqrt(-2 * math.log((w[i - i % 2] + 1) / 2**32))
        * (math.sin if i % 2 else math.cos)(2 * math.pi * w[i - i % 2 + 1] / 2**32)
        for i in range(n)
    ]
    np.testing.assert_allclose(normal((n,), KEY, 1, 2, dtype=torch.float64).numpy(), expected, rtol=1e-12)


@pytest.mark.slow
def test_integers():
    from scipy import stats  # here: it takes a while

    got = integers(-3, 7, (N,), KEY, 1, 2)
    expected = (words(N).astype(np.uint64) * 10 >> 32).astype(np.int64) - 3
    assert torch.equal(got, torch.from_numpy(expected))
    assert stats.chisquare(torch.bincount(got + 3).numpy()).pvalue > 1e-6
    with pytest.raises(ValueError, match=r"\[4, 4\)"):
        integers(4, 4, (1,), KEY, 1, 2)


def test_bernoulli():
    p = torch.tensor([0.0, 1.0, 0.3, 0.7]).repeat(N // 4)
    rates = bernoulli(p, KEY, 1, 2).view(-1, 4).mean(0)
    assert rates[:2].tolist() == [0.0, 1.0]
    assert abs(rates[2:] - p[2:4]).max() < 0.04
    same = bernoulli_like(p, 0.3, KEY, 1, 2)
    assert torch.equal(same, bernoulli(torch.full_like(p, 0.3).double(), KEY, 1, 2).float())
    with pytest.raises(ValueError, match="between 0 and 1"):
        bernoulli(p + 1, KEY, 1, 2)


def test_like_takes_shape_and_dtype():
    x = torch.empty(3, 4, dtype=torch.bfloat16)
    for y in (uniform_like(x, KEY, 1, 2), normal_like(x, KEY, 1, 2)):
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
    with pytest.raises(ValueError, match="int64"):
        uniform_like(torch.zeros(3, dtype=torch.int64), KEY, 1, 2)


def test_empty_and_scalar():
    assert uniform((0, 3), KEY, 1, 2).shape == (0, 3)
    assert normal((), KEY, 1, 2).shape == ()
