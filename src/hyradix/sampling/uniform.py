"""The random stream: one uniform number per (seed, position), and nothing else.

Owns: the counter-based generator. Does not know: rows, batches, logits.
Invariant: a number depends on (seed, position) alone, so a sampled token is the same whatever
else runs in the batch, in which row, after which preemption, and whether drafts were verified.
Read next: ``picking.py``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hyradix.request import Int64Array

UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def uniforms(seeds: Int64Array, positions: Int64Array) -> Float64Array:
    """Return ``float64[M]`` in [0, 1), multiples of 2**-53.

    Args:
        seeds: ``int64[M]``, any value.
        positions: ``int64[M]``, the absolute position that the sampled token will occupy.

    Source: the splitmix64 finaliser (Steele, Lea, Flood 2014), used as a hash: the seed is mixed
    first, so that streams of neighbouring seeds are not shifted copies of each other.
    """
    with np.errstate(over="ignore"):
        key = _mix(np.asarray(seeds, dtype=np.int64).view(np.uint64) + _GOLDEN)
        counter = np.asarray(positions, dtype=np.int64).view(np.uint64) + np.uint64(1)
        bits = _mix(_mix(key + counter * _GOLDEN) ^ key)
    result: Float64Array = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def _mix(x: UInt64Array) -> UInt64Array:
    x = (x ^ (x >> np.uint64(30))) * _MULTIPLIERS[0]
    x = (x ^ (x >> np.uint64(27))) * _MULTIPLIERS[1]
    return x ^ (x >> np.uint64(31))
