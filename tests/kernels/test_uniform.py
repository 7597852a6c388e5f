"""Random numbers: published results of Philox, and statistics along positions and seeds."""

from __future__ import annotations

import numpy as np
import pytest

from npuserve.kernels.uniform import golden, philox, uniform


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers_of_random123(counter: str, key: str, words: str) -> None:
    given, by, expected = ([[int(w, 16)] for w in text.split()] for text in (counter, key, words))
    out = philox(np.array(given, dtype=np.uint64), np.array(by, dtype=np.uint64))
    np.testing.assert_array_equal(out, np.array(expected, dtype=np.uint64))


def test_uniform_depends_only_on_seed_and_position() -> None:
    seeds = [0, 1, 2**32, 2**64 - 1, 7, 7]
    positions = [0, 5, 2**31, 131071, 3, 3]
    together = uniform(seeds, positions)
    assert together.dtype == np.float64
    assert [uniform([s], [p])[0] for s, p in zip(seeds, positions, strict=True)] == together.tolist()
    assert together[4] == together[5]
    assert len(set(together.tolist())) == 5
    assert len(uniform([], [])) == 0


def test_uniform_equals_philox() -> None:
    """Also with the native kernels."""
    random = np.random.default_rng(0)
    seeds, positions = (random.integers(0, 2**63, 500, dtype=np.uint64) * np.uint64(2) for _ in range(2))
    positions[:100] = np.arange(100)
    np.testing.assert_array_equal(uniform(seeds, positions), golden(seeds, positions))


def test_uniform_uses_all_bits_of_seed_and_position() -> None:
    seeds = [0, *(2**i for i in range(64))]
    positions = [0, *(2**i for i in range(63))]
    numbers = [*uniform(seeds, [0] * 65), *uniform([0] * 64, positions)[1:]]
    assert len(set(numbers)) == len(numbers)


N, BUCKETS = 64_000, 64
SEQUENCES = {
    "positions of one seed": (np.full(N, 42), np.arange(N)),
    "seeds at one position": (np.arange(N), np.full(N, 17)),
    "seeds far apart": (np.arange(N, dtype=np.uint64) << np.uint64(40), np.full(N, 1)),
    "seed and position together": (np.arange(N), np.arange(N)),
}


def far(counts: np.ndarray, expected: float) -> bool:
    """Return True if chi-square is more than five standard deviations from its mean."""
    freedom = counts.size - 1
    return bool(abs(((counts - expected) ** 2 / expected).sum() - freedom) > 5 * (2 * freedom) ** 0.5)


@pytest.mark.parametrize("name", SEQUENCES)
def test_uniform_is_even_with_independent_neighbours(name: str) -> None:
    numbers = uniform(*SEQUENCES[name])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert not far(np.histogram(numbers, BUCKETS, (0, 1))[0], N / BUCKETS)
    for lag in (1, 2, 7):
        pairs = np.histogram2d(numbers[:-lag], numbers[lag:], 16, [[0, 1], [0, 1]])[0]
        assert not far(pairs, (N - lag) / 256), lag
    low_bits = (numbers * 2.0**53).astype(np.uint64) % np.uint64(BUCKETS)
    assert not far(np.bincount(low_bits.astype(np.int64), minlength=BUCKETS), N / BUCKETS)
