"""Which block sizes each Triton kernel uses: a static table by device, shape and batch.

Owns: the choices. Does not know: kernels. No search at run time: the CPU interpreter cannot time,
and a choice that depends on what was timed today is not reproducible.

Invariants: a configuration changes speed, never results beyond the order of sums. What the table
does not list takes the nearest smaller batch's row of the ``default`` device.
Steps, folds, products of few rows and prefill were timed on an H200 (benchmarks/results/gpu);
the rest is reasoned from registers and spills.
Read next: ``benchmarks/gpu_kernels.py`` (which times them).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import torch

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class StepConfig:
    """A recurrent step: columns of d_v of a program, and its warps.

    is_fused: one launch for convolution, recurrence and norm, where a family has it; else a launch
    for what is ready first, and the norm by the program that holds a whole head or by a third.
    block_k: by a log, rows of d_k at a time, ``stages`` - 1 of them under way (0: all, in
    registers).
    """

    block_v: int
    num_warps: int = 1
    is_fused: bool = True
    block_k: int = 0
    stages: int = 1


@dataclass(frozen=True, slots=True)
class FoldConfig:
    """A fold: columns of d_v per program. stages: less one, rows of the log under way."""

    block_v: int
    num_warps: int = 1
    stages: int = 1


@dataclass(frozen=True, slots=True)
class VerifyConfig:
    """A masked tree verify: columns of d_v per program, d_k at a time."""

    block_v: int
    num_warps: int
    block_k: int = 32
    stages: int = 2


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    """Chunks of a prefill: columns of d_v that a program passes on, warps of both launches.

    Of gated delta nets alone: stages of the second, 2 where all numbers of a chunk are asked for at
    once, behind the chunk before it.
    """

    block_v: int
    solve_warps: int
    pass_warps: int
    stages: int = 1


@dataclass(frozen=True, slots=True)
class AttendConfig:
    """Attention: query rows (tokens x heads of a group) and keys at a time, parts of the keys."""

    block_m: int
    block_n: int
    splits: int
    num_warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """A product with few rows: outputs per program, inputs at a time.

    has_units: by matrix units, ``stages`` tiles of the loop, and inputs shared by ``splits``
    programs where nothing is fused behind; else up to four rows by threads, ``stages`` blocks of
    inputs under way.
    """

    block_o: int
    block_i: int
    num_warps: int
    stages: int
    has_units: bool = True
    splits: int = 1


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """One product of experts: outputs per program (of gates and of ups), inputs at a time."""

    block_n: int
    block_k: int
    num_warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Both products of a mixture of experts: pairs (token, choice) of one expert at a time."""

    block_m: int
    up: ProductConfig
    down: ProductConfig


Rows = tuple[tuple[int, C], ...]
"""(least batch, configuration), ascending."""

_STEP: dict[str, Rows[StepConfig]] = {
    "default": (
        (1, StepConfig(64, 4)),
        (8, StepConfig(32, 1, is_fused=False)),
        (32, StepConfig(64, 2, is_fused=False)),
    ),
}
_STEP_LOG: dict[str, Rows[StepConfig]] = {
    "default": (
        (1, StepConfig(32, 2)),
        (8, StepConfig(32, 1, is_fused=False)),
        (32, StepConfig(128, 1, is_fused=False, block_k=8, stages=3)),
    ),
}
_FOLD: dict[str, Rows[FoldConfig]] = {"default": ((1, FoldConfig(32, 2, 6)),)}
# By nodes. From 33 nodes on a product has 64 rows, and with 4 warps Triton 3.6 makes it of warp
# group instructions, which are suspected of an illegal access (benchmarks/gpu/bisect_tree.py).
_VERIFY: dict[str, Rows[VerifyConfig]] = {
    "default": (
        (1, VerifyConfig(16, 1, 16)),
        (17, VerifyConfig(32, 4, 16)),
        (33, VerifyConfig(16, 2, 16)),
    ),
}
_FUSED_ROWS: dict[str, Rows[int]] = {"default": ((1, 32), (8_192, 64), (16_384, 32))}
"""By rows of the weight; without tensor descriptors no more than ``PLAIN_ROWS``."""
PLAIN_ROWS = 16
_UNITS: dict[str, Rows[LinearConfig]] = {  # by rows of the weight
    "default": (
        (1, LinearConfig(64, 128, 4, 6, splits=3)),
        (8_192, LinearConfig(64, 128, 4, 3)),
    ),
}
_GATED_UNITS: dict[str, Rows[LinearConfig]] = {  # by rows of x
    "default": ((1, LinearConfig(128, 128, 4, 3)), (17, LinearConfig(128, 64, 4, 5))),
}
_PLAIN_UNITS: dict[str, Rows[LinearConfig]] = {  # without tensor descriptors
    "default": (
        (1, LinearConfig(64, 128, 2, 4, splits=4)),
        (8_192, LinearConfig(64, 128, 4, 4)),
    ),
}
_PLAIN_GATED_UNITS: dict[str, LinearConfig] = {"default": LinearConfig(128, 64, 4, 5)}
_VECTOR: dict[str, tuple[Rows[LinearConfig], ...]] = {  # of one row, two: by rows of the weight
    "default": (
        (
            (1, LinearConfig(4, 512, 2, 4, has_units=False)),
            (8_192, LinearConfig(4, 512, 2, 5, has_units=False)),
        ),
        (
            (1, LinearConfig(4, 512, 2, 4, has_units=False)),
            (8_192, LinearConfig(2, 256, 1, 10, has_units=False)),
        ),
    ),
}
_LONG_VECTOR: dict[str, tuple[LinearConfig, ...]] = {  # few outputs of many inputs
    "default": (
        LinearConfig(4, 1024, 4, 5, has_units=False),
        LinearConfig(2, 1024, 4, 9, has_units=False),
    ),
}
_LONG_INPUTS = 8_192
_EXPERTS: dict[str, Rows[ExpertConfig]] = {  # by pairs per 16 experts
    "default": (
        (0, ExpertConfig(16, ProductConfig(32, 128, 4, 4), ProductConfig(64, 128, 4, 4))),
        (8, ExpertConfig(16, ProductConfig(64, 128, 4, 4), ProductConfig(64, 128, 4, 4))),
        (160, ExpertConfig(32, ProductConfig(64, 128, 4, 4), ProductConfig(64, 128, 4, 4))),
        (512, ExpertConfig(64, ProductConfig(64, 64, 4, 4), ProductConfig(128, 64, 4, 4))),
        (1_280, ExpertConfig(128, ProductConfig(128, 64, 8, 3), ProductConfig(256, 64, 8, 3))),
    ),
}
_EXPERTS_32: dict[str, Rows[ExpertConfig]] = {  # the same where numbers are float32
    "default": (
        (0, ExpertConfig(16, ProductConfig(32, 64, 4, 3), ProductConfig(64, 64, 4, 3))),
        (512, ExpertConfig(32, ProductConfig(32, 32, 4, 3), ProductConfig(64, 32, 4, 3))),
    ),
}
_CHUNK: dict[str, Rows[ChunkConfig]] = {  # by sequences
    "default": ((1, ChunkConfig(32, 4, 4, 2)), (4, ChunkConfig(64, 4, 4))),
}
# Float32 activations, keys of 128 numbers: with block_v 32, ptxas of Triton 3.6 takes operands of
# six products from elsewhere (``benchmarks/gpu/machine_code.py``).
_EXACT_CHUNK: dict[str, ChunkConfig] = {"default": ChunkConfig(64, 4, 4)}
# Keys of under 128 numbers, and values that leave a part of a tile empty: with 4 warps (so warp
# group products) heads of 40 x 72, 72 x 24 and 128 x 24 were wrong or ended in an illegal access on
# an H200, though none leaves its tensor in the interpreter. 2 warps make none of those products.
_NARROW_CHUNK: dict[str, ChunkConfig] = {"default": ChunkConfig(32, 2, 2)}
_MAMBA2_CHUNK: dict[str, ChunkConfig] = {"default": ChunkConfig(32, 4, 8)}
_KDA_CHUNK: dict[str, ChunkConfig] = {"default": ChunkConfig(32, 4, 8)}
_LONG = AttendConfig(128, 64, 1, 8, 3)
_GATHERED = (_LONG, AttendConfig(128, 64, 1, 8, 2))  # the second: heads of over 128 numbers
_MULTIPROCESSORS: dict[str, int] = {"default": 132, "cpu": 1}  # cpu: the interpreter, one by one


def step_config(device: torch.device, batch: int, *, is_log: bool) -> StepConfig:
    """For one decode step of ``batch`` rows."""
    return _choose(_STEP_LOG if is_log else _STEP, device, batch)


def fold_config(device: torch.device, batch: int) -> FoldConfig:
    """For a fold of ``batch`` states."""
    return _choose(_FOLD, device, batch)


def verify_config(device: torch.device, nodes: int) -> VerifyConfig:
    """For trees of up to ``nodes`` nodes."""
    return _choose(_VERIFY, device, nodes)


def chunk_config(
    device: torch.device, num_sequences: int, k_dim: int, v_dim: int, *, is_exact: bool
) -> ChunkConfig:
    """For a prefill of gated delta nets. is_exact: of float32 activations."""
    chosen = _choose(_CHUNK, device, num_sequences)
    if is_exact and k_dim == 128:
        chosen = _of(_EXACT_CHUNK, device)
    is_whole = k_dim >= 128 and v_dim % chosen.block_v == 0
    return chosen if is_whole else _of(_NARROW_CHUNK, device)


def mamba2_chunk_config(device: torch.device) -> ChunkConfig:
    """For a prefill of Mamba2 layers."""
    return _of(_MAMBA2_CHUNK, device)


def kda_chunk_config(device: torch.device) -> ChunkConfig:
    """For a prefill of KDA layers."""
    return _of(_KDA_CHUNK, device)


def max_fused_rows(device: torch.device, outputs: int, *, has_descriptors: bool) -> int:
    """Up to so many rows a product with a weight of ``outputs`` rows is ``few_rows_linear``, else
    torch's own."""
    most = _choose(_FUSED_ROWS, device, outputs)
    return most if has_descriptors else min(most, PLAIN_ROWS)


def linear_config(
    device: torch.device,
    outputs: int,
    inputs: int,
    rows: int,
    *,
    is_gated: bool,
    has_descriptors: bool,
) -> LinearConfig:
    """For ``rows`` times a weight ``[outputs, inputs]``; is_gated: of gates and ups."""
    vectors = _of(_VECTOR, device)
    if rows > len(vectors) and has_descriptors:
        return _choose(_GATED_UNITS, device, rows) if is_gated else _choose(_UNITS, device, outputs)
    if rows > len(vectors):
        return (
            _of(_PLAIN_GATED_UNITS, device) if is_gated else _choose(_PLAIN_UNITS, device, outputs)
        )
    if inputs >= _LONG_INPUTS > outputs:
        return _of(_LONG_VECTOR, device)[rows - 1]
    return _fitting(vectors[rows - 1], outputs)


def expert_config(
    device: torch.device, *, pairs: int, num_experts: int, itemsize: int
) -> ExpertConfig:
    """For so many (token, choice) pairs over all experts of a layer; itemsize: of the weights."""
    return _choose(_EXPERTS if itemsize == 2 else _EXPERTS_32, device, 16 * pairs // num_experts)


def attend_config(
    device: torch.device,
    *,
    rows: int,
    programs: int,
    dim: int,
    itemsize: int,
    is_gathered: bool = False,
) -> AttendConfig:
    """rows: query rows of one block before padding; programs: blocks x KV heads; dim: of a head.

    Splits fill the device as often as a multiprocessor holds programs at once: four times, three
    with wide heads, once with blocks of over 64 query rows; no more than 64 parts. itemsize: bytes
    of a number of the pools; heads of over 256 numbers take 64 query rows where it is 2. Where it
    is 4, tiles and their three tf32 parts must fit shared memory: no more than 32 query rows (so
    heads of one KV head) from 129 numbers on. Keys come by a table of slots, so one tile is on its
    way with 3 or 4 stages, two with 5; is_gathered: they do not (``attention/triton_gather.py``).
    """
    wide, is_heavy = dim > 256, itemsize > 2 and dim > 64
    most = 32 if is_heavy and dim > 128 else 64
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else most
    at_once = 1 if rows > 64 else 3 if wide else 4
    splits = _parts(at_once * _of(_MULTIPROCESSORS, device) // max(programs, 1))
    if rows > 64 and not wide and not is_heavy:
        return replace(_GATHERED[dim > 128] if is_gathered else _LONG, splits=splits)
    block_n, warps, stages = 64 if dim <= 128 else 32, 4, 3
    if is_heavy:
        block_n, warps, stages = 32, 4 if dim <= 128 else 8, 2
    if wide:
        warps, stages = 8, 2 if itemsize > 2 else 5 if block_m <= 32 else 3
    return AttendConfig(block_m, block_n, splits, warps, stages)


def _parts(wanted: int) -> int:
    """A power of two up to what is wanted, from 1 to 64."""
    return min(64, 1 << max(wanted, 1).bit_length() - 1)


def _of(table: dict[str, C], device: torch.device) -> C:
    return table.get(_name(device), table["default"])


def _choose(table: dict[str, Rows[C]], device: torch.device, size: int) -> C:
    return _fitting(_of(table, device), size)


def _fitting(rows: Rows[C], size: int) -> C:
    return next((config for least, config in reversed(rows) if least <= size), rows[0][1])


@lru_cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
