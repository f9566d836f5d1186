"""Whole slots and rows of a registry of tensors, all tensors and layers in one launch.

Owns: ``Registry``, the table of addresses that a kernel walks, so that no mover forgets a tensor.
Does not know: what the tensors hold.

Invariants:
- Tensors stay where they are for a registry's life (pools are allocated once).
- Memory is moved as words of 4 bytes, or of 2 where some slot's bytes are no multiple of 4.
- Entries with target slot 0, or row 0, do nothing: lists are padded with them.
Read next: ``reference.py`` (the meaning).
"""
# mypy: ignore-errors
# (kernels are typed by Triton, not by annotations)

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hyradix.kernels.triton_support import ceil_div, launch

_FIELDS = tl.constexpr(6)
BLOCK = 2048
"""Words that one program moves."""


class Registry:
    """Tensors ``[L, slots, ...]`` (or ``[L, N+1, M, ...]`` with the number of the first row).

    table: ``int64[tensors, 6]`` on the device: address, programs before it, words of a slot (or
    row), words from slot to slot, from layer to layer, programs of a layer; words from row to row
    are those of a row.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], firsts: Sequence[int] | None = None
    ) -> None:
        """firsts: given, the tensors are moved by row, from that row on."""
        self.tensors = tuple(tensors)  # they live as long as their addresses
        lead = 2 if firsts is None else 3
        sizes = [x[(0,) * lead].numel() * x.element_size() for x in self.tensors]
        self.word_bytes = 4 if all(size % 4 == 0 for size in sizes) else 2
        entries, self.num_programs = [], 0
        for i, (x, size) in enumerate(zip(self.tensors, sizes, strict=True)):
            assert x[0, 0].is_contiguous(), "a slot's memory is one piece"
            assert x.element_size() * x.stride(0) % self.word_bytes == 0
            scale = x.element_size() / self.word_bytes
            words = size // self.word_bytes
            first = 0 if firsts is None else firsts[i] * words * self.word_bytes
            programs = ceil_div(words, BLOCK)
            strides = (int(x.stride(1) * scale), int(x.stride(0) * scale))
            entries.append([x.data_ptr() + first, self.num_programs, words, *strides, programs])
            self.num_programs += programs * x.shape[0]
        per_vector = 16 // self.word_bytes
        self.is_aligned = all(
            address % 16 == 0 and words % per_vector == slot % per_vector == layer % per_vector == 0
            for address, _, words, slot, layer, _ in entries
        )
        table = torch.tensor(entries, dtype=torch.int64)
        self.table = table.to(self.tensors[0].device)


def move_slots_(registry: Registry, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """See ``reference.move_slots_``; sources, targets: ``int32[J]``."""
    launch(
        _move_slots_kernel,
        (registry.num_programs, sources.shape[0]),
        registry.table, sources, targets,
        len(registry.tensors), registry.word_bytes, registry.is_aligned, BLOCK,
    )  # fmt: skip


def move_rows_(
    registry: Registry,
    rows: torch.Tensor,
    sources: torch.Tensor,
    firsts: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """See ``reference.move_rows_``; int32 tensors, sources ``[N, J]``."""
    assert sources.is_contiguous()
    launch(
        _move_rows_kernel,
        (registry.num_programs, rows.shape[0]),
        registry.table, rows, sources, firsts, counts, sources.shape[1],
        len(registry.tensors), registry.word_bytes, registry.is_aligned, BLOCK,
    )  # fmt: skip


@triton.jit
def _find(table, program, TENSORS: tl.constexpr):
    """The table row that a program works on: the last one that begins at or before it."""
    found = table
    for i in tl.static_range(1, TENSORS):
        if program >= tl.load(table + i * _FIELDS + 1):
            found = table + i * _FIELDS
    return found


@triton.jit
def _field(entry, index: tl.constexpr, WORD_BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    """A number of words from the table; where it is one of whole vectors, the compiler is told."""
    value = tl.load(entry + index)
    if ALIGNED:
        value = tl.multiple_of(value, 16 // WORD_BYTES)
    return value


@triton.jit
def _place(entry, program, WORD_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Where a program's words stand in slot 0, and which of them there are."""
    per_layer = tl.load(entry + 5)
    inside = program - tl.load(entry + 1)
    pointer = tl.load(entry).to(tl.pointer_type(tl.int32 if WORD_BYTES == 4 else tl.int16))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    pointer += inside // per_layer * _field(entry, 4, WORD_BYTES, ALIGNED)
    word = inside % per_layer * BLOCK + tl.arange(0, BLOCK)
    return pointer + word, word < _field(entry, 2, WORD_BYTES, ALIGNED)


@triton.jit
def _move_slots_kernel(
    table, sources, targets,
    TENSORS: tl.constexpr, WORD_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    target = tl.load(targets + tl.program_id(1)).to(tl.int64)
    if target == 0:
        return
    source = tl.load(sources + tl.program_id(1)).to(tl.int64)
    program = tl.program_id(0).to(tl.int64)
    entry = _find(table, program, TENSORS)
    places, mask = _place(entry, program, WORD_BYTES, ALIGNED, BLOCK)
    stride = _field(entry, 3, WORD_BYTES, ALIGNED)
    words = tl.load(places + source * stride, mask=mask & (source >= 0), other=0)
    tl.store(places + target * stride, words, mask=mask)


@triton.jit(do_not_specialize=["sources_stride"])
def _move_rows_kernel(
    table, rows, sources, firsts, counts, sources_stride,
    TENSORS: tl.constexpr, WORD_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1)
    row = tl.load(rows + n).to(tl.int64)
    count = tl.load(counts + n)
    if (row == 0) | (count == 0):
        return
    program = tl.program_id(0).to(tl.int64)
    entry = _find(table, program, TENSORS)
    places, mask = _place(entry, program, WORD_BYTES, ALIGNED, BLOCK)
    places += row * _field(entry, 3, WORD_BYTES, ALIGNED)
    size = _field(entry, 2, WORD_BYTES, ALIGNED)
    target = tl.load(firsts + n)
    for j in range(count):
        source = tl.load(sources + n * sources_stride + j)
        words = tl.load(places + source * size, mask=mask, other=0)
        tl.store(places + (target + j) * size, words, mask=mask)
