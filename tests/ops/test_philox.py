"""The stream against its published vectors, and every fast form against the reference."""

import numpy as np
import pytest
from compiled import with_threads
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.ops import kernels, philox_words, stream_key
from mpipipe.ops.philox import philox4x32, threshold, words

# Random123 distribution, kat_vectors, philox4x32 with 10 rounds: counter, key -> output
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
KEYS = st.integers(0, 2**64 - 1)
HALVES = st.integers(0, 2**32 - 1)
# also where the low half of the block number wraps into the high one
STARTS = st.one_of(st.integers(0, 2000), st.integers(2**34 - 1500, 2**34 + 100), st.integers(0, 2**62))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_vectors(counter, key, expected):
    c0, c1 = (np.array([c], np.uint64) for c in counter[:2])
    got = philox4x32(c0, c1, counter[2], counter[3], key[0] | key[1] << 32)
    assert tuple(got[0].tolist()) == expected
    assert kernels.reference_cipher(*counter, *key) == expected


def test_the_kernels_are_built():
    assert kernels is not None, "run `make setup`: the extension mpipipe._kernels_* is part of the package"


@given(KEYS, HALVES, HALVES, STARTS, st.integers(0, 700))
def test_kernel_and_numpy_give_the_reference_words(key, step, micro, start, n):
    expected = np.empty(n, np.uint32)
    kernels.reference_words(key, step, micro, start, expected.ctypes.data, n)
    np.testing.assert_array_equal(philox_words(key, step, micro, n, start), expected)
    np.testing.assert_array_equal(words(key, step, micro, n, start), expected)


def test_numpy_pieces_join():
    n = 4 * (1 << 14) + 7  # more than one piece of numpy work
    np.testing.assert_array_equal(philox_words(9, 1, 2, n, 3), words(9, 1, 2, n, 3))


def test_threads_do_not_change_words():
    one, *more = with_threads(lambda: words(9, 1, 2, 50_001, 3))
    np.testing.assert_array_equal(one, philox_words(9, 1, 2, 50_001, 3))
    assert all(np.array_equal(one, other) for other in more)


@given(KEYS, st.integers(0, 500), st.integers(0, 500))
def test_a_slice_is_a_slice_of_the_whole(key, start, n):
    np.testing.assert_array_equal(words(key, 3, 4, n, start), words(key, 3, 4, 1000)[start : start + n])


def test_streams_differ_in_each_part_of_their_name():
    base = words(stream_key(0, "drop"), 1, 2, 64)
    others = [
        words(stream_key(1, "drop"), 1, 2, 64),
        words(stream_key(0, "drop2"), 1, 2, 64),
        words(stream_key(0, "drop"), 2, 2, 64),
        words(stream_key(0, "drop"), 1, 3, 64),
    ]
    assert all((base != other).sum() > 60 for other in others)


def test_the_stream_is_frozen():
    """Runs of old checkpoints must replay: these numbers may never change."""
    assert stream_key(0, "blocks.0.attn/dropout.0") == 0x548FFB3B2AC3E120
    assert philox_words(stream_key(1234, "mlp/dropout.1"), 7, 5, 5, start=2).tolist() == [
        2059989991, 4077023482, 3353144672, 2258191662, 4016297699,
    ]  # fmt: skip


def test_bits_are_even():
    ones = np.unpackbits(words(stream_key(3, "x"), 0, 0, 1 << 16).view(np.uint8)).reshape(-1, 32).mean(0)
    assert abs(ones - 0.5).max() < 5 * 0.5 / 256  # 5 standard deviations of 65,536 coin flips


@pytest.mark.parametrize(
    ("key", "step", "micro"), [(-1, 0, 0), (1 << 64, 0, 0), (0, -1, 0), (0, 0, 1 << 32), (1.5, 0, 0)]
)
def test_a_stream_outside_its_width_is_refused(key, step, micro):
    with pytest.raises(ValueError, match="stream_key"):
        words(key, step, micro, 4)
    with pytest.raises(ValueError, match="stream_key"):
        philox_words(key, step, micro, 4)


def test_threshold():
    assert [threshold(p) for p in (0.0, 0.5, 1.0)] == [0, 1 << 31, 1 << 32]
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            threshold(p)
