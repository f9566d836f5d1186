"""What every Triton kernel here shares: activations, the launch, and limits of one program.

Owns: ``launch`` (the one place that starts a kernel) and small device functions. Does not know:
operations, shapes, devices' configurations.

Invariants:
- A launch waits for nothing and allocates nothing: safe inside a CUDA graph.
- Kernels take pool tensors and device index tensors; grids follow from padded sizes, never from
  values on the device.
- A chained kernel (``chained`` its last parameter) may begin while the one before it still runs: it
  asks for what was there long before (weights, states), then calls ``wait_for_previous``, in every
  program and before all else; what it reads before that was written before the last launch that is
  not chained. It lets the next begin only behind its own wait, so no more than two overlap.
- A slot, row, layer or token number is made int64 before it is multiplied: pools have more than
  2^31 elements (``test_large_pools.py``). Offsets inside of one slot or row are int32.
Read next: ``triton_table.py``, ``gated_delta_net/triton.py``.
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hyradix.kernels.triton_launches import start


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 1,
    is_chained: bool = False,
) -> None:
    """Start ``kernel`` with ``args`` in the order of its parameters, constants last.

    is_chained: the kernel's last constant is given here, see the module's invariants.
    """
    if 0 in grid:
        return
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    if is_chained:
        can_overlap = _can_overlap(args[0].device)
        args = (*args, can_overlap)
        if can_overlap:
            options["launch_pdl"] = True
    start(kernel, grid, args, options)


@lru_cache
def _can_overlap(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launches."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def has_descriptors(device: torch.device) -> bool:
    """Whether the device copies tiles by tensor descriptors (TMA)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def power_of_two(n: int, *, least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``least``.

    Triton's own function is made for kernels too, and takes 2 us; so is its ``cdiv``.
    """
    return max(1 << (n - 1).bit_length() if n > 0 else 0, least)


def ceil_div(n: int, size: int) -> int:
    """How many blocks of ``size`` hold ``n``."""
    return -(-n // size)


def divisor(n: int, wanted: int) -> int:
    """The largest divisor of ``n`` that is at most ``wanted``."""
    return next(d for d in range(min(n, wanted), 0, -1) if n % d == 0)


def output_precision(dtype: torch.dtype) -> str:
    """Of products of float32 numbers that outputs are made of, where activations have ``dtype``.

    One tf32 pass is nearer than bfloat16 can tell; float32 engines are exact to about 1e-5. States
    take three passes in any case, and operands of bfloat16 are not touched by this.
    """
    return "tf32x3" if dtype == torch.float32 else "tf32"


@triton.jit
def wait_for_previous(CHAINED: tl.constexpr):
    """All that was launched before is done, and what it wrote is seen; the next may begin."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def quick_silu(x):
    """silu by a reciprocal root, a few units of float32's last place off: a division is ten
    instructions, this is three."""
    root = tl.rsqrt(1.0 + tl.exp(-x))
    return x * root * root


@triton.jit
def softplus(x):
    """log(1 + e^x), near float32 for every x; above 20 that is x (torch's threshold).

    Slow decays are small values, and their errors add up over a sequence: what 1 + e loses of e
    is put back by the factor e / ((1 + e) - 1).
    """
    e = tl.exp(tl.minimum(x, 20.0))
    rounded = 1.0 + e
    kept = rounded - 1.0
    is_lost = kept == 0.0
    small = tl.where(is_lost, e, tl.log(rounded) * (e / tl.where(is_lost, 1.0, kept)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def issue_loads():
    """What was loaded above is asked for before anything below: nothing is waited for but threads.

    Without it the assembler puts a load off until just before its use, and one wait follows the
    other.
    """
    tl.debug_barrier()


@triton.jit
def two_sums(x, a, b, axis: tl.constexpr):
    """Sums of x a and of x b along an axis, in one go: between warps each costs three barriers."""
    return tl.split(tl.sum(tl.join(x * a, x * b), axis))


@triton.jit
def load32(pointer, mask):
    """Float32 of whatever is stored there, 0 outside the mask."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(pointer, value, mask):
    """``value`` in the type that the pointer has."""
    tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)
