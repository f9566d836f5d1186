"""The checker of interpreted accesses finds what a device would refuse."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from hyradix.kernels.state_slots.triton import Registry
from hyradix.kernels.triton_support import launch
from tests.kernels.triton_kernels.conftest import IS_INTERPRETED
from tests.kernels.triton_kernels.memory_check import checked_memory

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="kernels are compiled here")


@triton.jit
def _copy_kernel(x, out, first, count, STEP: tl.constexpr, BLOCK: tl.constexpr):
    i = first + tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < count, other=0.0), mask=i < count)


@triton.jit
def _shifted_kernel(x, out, BYTES: tl.constexpr):
    pointer = (x.to(tl.pointer_type(tl.int8)) + BYTES).to(tl.pointer_type(tl.float32))
    tl.store(out, tl.load(pointer))


@triton.jit
def _table_kernel(table, out):
    tl.store(out, tl.load(tl.load(table).to(tl.pointer_type(tl.int32))))


def fault(kernel, grid, *args) -> str:
    """What the checker says of a launch, or nothing."""
    with checked_memory(races=True):
        try:
            launch(kernel, grid, *args)
        except InterpreterError as error:
            return str(error)
        except AssertionError as error:
            return str(error)
    return ""


def test_accesses_inside_are_silent():
    x, out = torch.randn(8), torch.zeros(8)
    assert fault(_copy_kernel, (2,), x, out, 0, 8, 4, 4) == ""
    assert torch.equal(x, out)


def test_an_active_address_outside_is_named():
    x, out = torch.randn(8), torch.zeros(64)[:8]
    assert "load outside" in fault(_copy_kernel, (1,), x, out, -1, 8, 4, 4)
    whole = torch.zeros(64)
    message = fault(_copy_kernel, (1,), whole[:16], whole[32:40], 0, 12, 4, 16)
    assert "_copy_kernel" in message
    assert "store outside: 32 bytes behind the start of out (32 bytes)" in message


def test_addresses_of_a_mask_may_be_anything():
    x, out = torch.randn(8), torch.zeros(8)
    assert fault(_copy_kernel, (1,), x, out, 4, 8, 4, 16) == ""


def test_a_misaligned_address_is_named():
    x, out = torch.randn(8), torch.zeros(1)
    assert fault(_shifted_kernel, (1,), x, out, 8) == ""
    assert "misaligned" in fault(_shifted_kernel, (1,), x, out, 6)


def test_two_programs_that_touch_one_byte_are_named():
    x, out = torch.randn(8), torch.zeros(8)
    assert "by two programs" in fault(_copy_kernel, (2,), x, out, 0, 8, 2, 4)
    assert "of a store beside" in fault(_copy_kernel, (2,), x[1:], x, 0, 7, 4, 4)


def test_a_registrys_tensors_are_known():
    x, out = torch.ones(1, 2, 4), torch.zeros(1, dtype=torch.int32)
    table = torch.tensor([x.data_ptr()])
    assert "outside" in fault(_table_kernel, (1,), table, out)
    with checked_memory() as check:
        Registry([x])
        launch(_table_kernel, (1,), table, out)
    assert check.num_accesses == 3
