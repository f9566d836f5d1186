"""From weights to one index: a race, whose clocks are keyed by (seed, position) and index alone.

Owns: the counter-based generator and the draw. Does not know: rows, batches, logits.

Index i arrives after an exponential time of mean 1 / weight i; the first one is drawn, which has
the distribution of the weights. Against one uniform number on the cumulative weights (an inverse
CDF), what a rounded weight can change is a draw whose two first arrivals are that near each other.
There an error of 1e-6 moved the edges of all indices behind it, and with thousands of small ones
some edge was always close: of a hundred sampled replies over HTTP about one depended on the rest.

The race has two heats: of B blocks of ``BLOCK`` indices by the sums of their weights, then of the
first block's indices. So a draw takes V / ``BLOCK`` + ``BLOCK`` clocks in place of V. Index i lies
in block i % B: then a sum is one of whole rows of memory.

Invariants:
- A clock depends on (seed, position) and its index alone, so a sampled token is the same whatever
  else runs in the batch, in which row, after which preemption, and whether drafts were verified.
- Host and device may add a block in another order: a matter of 1e-16, beside a rounding of logits.
- On a device launches alone: nothing waits for it.
Read next: ``picking.py``; ``tests/sampling/reference_sampler.py`` is the readable twin.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hyradix.request import Int64Array

UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]

BLOCK = 128
"""Indices of one block."""
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_KEY_BITS = 53
"""A key is a whole number that float64 holds: it travels among a row's other numbers."""


def keys(seeds: Int64Array, positions: Int64Array) -> Int64Array:
    """Return ``int64[M]`` in [0, 2**53).

    Args:
        seeds: ``int64[M]``, any value.
        positions: ``int64[M]``, the absolute position that the sampled token will occupy.

    Source: the splitmix64 finaliser (Steele, Lea, Flood 2014), used as a hash: the seed is mixed
    first, so that streams of neighbouring seeds are not shifted copies of each other.
    """
    golden = np.uint64(_GOLDEN)
    with np.errstate(over="ignore"):
        key = _mix(np.asarray(seeds, dtype=np.int64).view(np.uint64) + golden)
        counter = np.asarray(positions, dtype=np.int64).view(np.uint64) + np.uint64(1)
        bits = _mix(_mix(key + counter * golden) ^ key)
    return (bits >> np.uint64(64 - _KEY_BITS)).astype(np.int64)


def first_to_arrive(weights: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Draw one index per row: ``int64[M]``.

    Args:
        weights: ``float64[M, V]``, none negative, some positive; a row of NaN gives any index.
        key: ``int64[M]``, see ``keys``.
    """
    num_indices = weights.shape[1]
    padding = -num_indices % BLOCK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.view(len(weights), BLOCK, -1)
    if weights.device.type == "cpu":  # a call of numpy's costs a fraction of one of torch's
        drawn = torch.from_numpy(draw_on_host(blocks.numpy(), key.numpy()))
    else:
        drawn = draw_on_device(blocks, key)
    drawn.clamp_(max=num_indices - 1)  # of a row of NaN it may be padding
    return drawn


def draw_on_host(blocks: Float64Array, key: Int64Array) -> Int64Array:
    """From ``float64[M, BLOCK, B]``: index i lies in block i % B."""
    num_rows, _, num_blocks = blocks.shape
    key = key[:, None]
    # Clocks of blocks count down from -1, those of indices up from 0.
    times = host_clocks(key, -1 - np.arange(num_blocks))
    block = (blocks.sum(axis=1) / times).argmax(axis=1)
    times = host_clocks(key, block[:, None] + np.arange(BLOCK) * num_blocks)
    place = (blocks[np.arange(num_rows), :, block] / times).argmax(axis=1)
    drawn: Int64Array = place * num_blocks + block
    return drawn


def draw_on_device(blocks: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``draw_on_host``, by torch."""
    num_blocks = blocks.shape[2]
    numbers = torch.arange(max(num_blocks, BLOCK), device=blocks.device)
    key = key[:, None]
    times = device_clocks(key, -1 - numbers[:num_blocks])
    block = (blocks.sum(dim=1) / times).argmax(dim=1, keepdim=True)
    times = device_clocks(key, block + numbers[:BLOCK] * num_blocks)
    inside = blocks.gather(2, block[:, None].expand(-1, BLOCK, -1)).squeeze(2)
    place = (inside / times).argmax(dim=1, keepdim=True)
    return (place * num_blocks + block).flatten()


def host_clocks(key: Int64Array, index: Int64Array) -> Float64Array:
    """Exponential numbers of mean 1, none of them 0; arguments are broadcast.

    Source: splitmix64 seeded with ``key``, at ``index``; integers wrap around.
    """
    bits = _mix((key + index * np.int64(_signed(_GOLDEN))).view(np.uint64))
    numbers: Float64Array = (bits >> np.uint64(12)).astype(np.float64)
    return -np.log((numbers + 0.5) * 2.0**-52)


def device_clocks(key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``host_clocks``, by torch, whose integers have a sign."""
    bits = key + index * _signed(_GOLDEN)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        bits = (bits ^ _shifted(bits, shift)) * _signed(multiplier)
    bits = _shifted(bits ^ _shifted(bits, 31), 12)
    return -((bits.double() + 0.5) * 2.0**-52).log_()


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """To the right, with zeros: torch's shift repeats the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _mix(x: UInt64Array) -> UInt64Array:
    first, second = (np.uint64(multiplier) for multiplier in _MULTIPLIERS)
    x = (x ^ (x >> np.uint64(30))) * first
    x = (x ^ (x >> np.uint64(27))) * second
    return x ^ (x >> np.uint64(31))
