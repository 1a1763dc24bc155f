"""Random numbers that are a function of what they are for, not of who asks or when.

A counter hash (SplitMix64's finaliser: Steele, Lea and Flood 2014, "Fast splittable pseudorandom
number generators") turns (seed, epoch, row, ...) into uniform numbers, a whole batch at a time and
without a generator object an image. Unlike numpy's generators, whose streams may change between
releases, it gives the same numbers on every version, so a run can be resumed after an upgrade.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seed: int, stream: int, ids: NDArray[np.int64], draws: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), shape (len(ids), draws).

    Args:
        seed: the recipe's seed, not negative.
        stream: what they are for, such as the epoch; streams are independent of each other.
        ids: what each row of numbers belongs to, such as row numbers; not negative.
        draws: how many numbers an id.
    """
    key = np.zeros(len(ids), dtype=np.uint64)
    for part in (seed, stream, ids):
        key = _mix(key + _GOLDEN + np.asarray(part).astype(np.uint64))
    counters = np.arange(1, draws + 1, dtype=np.uint64) * _GOLDEN
    bits = _mix(key[:, None] + counters[None, :])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
