"""Steps of prefill in memory of fixed place: what is there, what pads it, what does not fit."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from hyradix.kernels.attention.triton import query_blocks
from hyradix.kernels.attention.triton_gather import key_layout
from hyradix.kernels.gated_delta_rule.triton import chunk_table
from hyradix.request import SINK
from hyradix.runner.prefill_form import EXTRA_CHUNKS, SAVES, PrefillForm, PrefillSize

ROWS, SINK_ROW, SINK_AT = 4, 9, 900
SIZES = (
    PrefillSize(16, ROWS, 16, 0),
    PrefillSize(64, ROWS, 16, 0),
    PrefillSize(192, ROWS, 32, 320),
)
Arrays = dict[str, Any]


def laid_out(size: PrefillSize, counts: list[int], starts: list[int], saves: list[int]) -> Arrays:
    """As the planner has it. saves: of the first row, at so many of its tokens."""
    rows = len(counts)
    of_rows, begins = np.array(counts, np.int32), np.array(starts, np.int32)
    cu = np.concatenate([[0], np.cumsum(of_rows)]).astype(np.int32)
    offsets = np.array([0] + [len(saves)] * rows, np.int32)
    at, slots = np.array(saves, np.int32), np.arange(50, 50 + len(saves), dtype=np.int32)
    table, chunk_offsets = chunk_table(cu, offsets, at, slots)
    tokens = np.arange(cu[-1], dtype=np.int32)
    arrays = {
        "positions": tokens + 5,
        "write_slots": tokens + 100,
        "token_at": tokens.astype(np.int64) + (1 << 40),
        "last": cu[1:] - 1,
        "last_rows": np.arange(rows, dtype=np.int32),
        "last_positions": begins + of_rows - 1,
        "next_at": np.arange(rows, dtype=np.int64) + (1 << 41),
        "seq_cu": cu,
        "seq_rows": np.arange(rows, dtype=np.int32),
        "seq_starts": begins,
        "seq_blocks": query_blocks(cu, begins, size.tokens_per_block),
        "seq_of": np.repeat(np.arange(rows, dtype=np.int32), of_rows),
        "seq_save_offsets": offsets,
        "seq_save_at": at,
        "seq_save_slots": slots,
        "seq_chunks": table,
        "seq_chunk_offsets": chunk_offsets,
        "seq_slots": np.arange(20, 20 + rows, dtype=np.int32),
    }
    if size.num_keys:
        arrays["key_blocks"], arrays["key_offsets"] = key_layout(begins + of_rows)
    return arrays


def columns(form: PrefillForm, size: PrefillSize) -> Arrays:
    found = form.columns(torch.from_numpy(form.numbers.copy()), size)
    return {name: x.numpy() for name, x in found.items()}


@st.composite
def steps(draw: st.DrawFn, size: PrefillSize) -> Arrays:
    """Any that fit."""
    counts = []
    for _ in range(draw(st.integers(1, ROWS))):
        left = size.num_tokens - sum(counts)
        if left:
            counts.append(draw(st.integers(1, left)))
    most = 30 if size.num_keys else 5000
    starts = [draw(st.integers(0, most)) for _ in counts]
    saves = draw(st.sets(st.integers(1, counts[0]), max_size=4))
    return laid_out(size, counts, starts, sorted(saves))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_every_token_is_in_one_chunk_and_one_block(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(SIZES))
    arrays = data.draw(steps(size))
    form = PrefillForm(SIZES, SINK_ROW, SINK_AT)
    assert form.fill(size, arrays)
    found = columns(form, size)
    rows, num_tokens = len(arrays["seq_rows"]), int(arrays["seq_cu"][-1])
    for name, given_numbers in arrays.items():
        if name not in ("seq_cu", "seq_chunk_offsets", "seq_save_offsets", "key_offsets"):
            assert np.array_equal(found[name][: len(given_numbers)], given_numbers), name
    cu, offsets = found["seq_cu"], found["seq_chunk_offsets"]
    assert np.array_equal(cu[: rows + 1], arrays["seq_cu"])
    assert cu[-1] == size.num_tokens
    assert (cu[rows:-1] == num_tokens).all()
    assert np.array_equal(found["seq_of"], np.repeat(np.arange(ROWS + 1), np.diff(cu)))

    in_chunks, in_blocks = np.zeros(size.num_tokens, int), np.zeros(size.num_tokens, int)
    for i in range(ROWS + 1):
        at = cu[i]
        for first, count, save in found["seq_chunks"][offsets[i] : offsets[i + 1]]:
            assert first == at
            assert 0 < count <= 64
            assert i < rows or save == SINK
            in_chunks[first : first + count] += 1
            at += count
        assert at == cu[i + 1]
    assert (found["seq_chunks"][offsets[-1] :] == 0).all()
    for i, first in found["seq_blocks"]:
        end = min(first + size.tokens_per_block, cu[i + 1] - cu[i])
        in_blocks[cu[i] + first : cu[i] + end] += 1
    assert (in_chunks == 1).all()
    assert (in_blocks == 1).all()


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_padding_is_of_sinks_and_sees_nothing(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(SIZES))
    form = PrefillForm(SIZES, SINK_ROW, SINK_AT)
    form.fill(SIZES[-1], laid_out(SIZES[-1], [150, 20], [3, 70], [10, 77]))
    arrays = data.draw(steps(size))
    assert form.fill(size, arrays)
    found, rows = columns(form, size), len(arrays["seq_rows"])
    fresh = PrefillForm(SIZES, SINK_ROW, SINK_AT)
    assert fresh.fill(size, arrays)
    for name, numbers in columns(fresh, size).items():
        assert np.array_equal(found[name], numbers), f"{name}: something of the step before"
    num_tokens = int(arrays["seq_cu"][-1])
    assert (found["write_slots"][num_tokens:] == SINK).all()
    assert (found["token_at"][num_tokens:] == SINK_AT).all()
    assert (found["next_at"][rows:] == SINK_AT + 1).all()
    assert (found["last_positions"][rows:] == -1).all()
    for name in ("seq_rows", "last_rows"):
        assert (found[name][rows:] == SINK_ROW).all()
    assert (found["seq_slots"][rows:] == SINK).all()
    assert found["seq_starts"][-1] == num_tokens - size.num_tokens
    if size.num_keys:
        assert np.array_equal(found["key_offsets"][: rows + 1], arrays["key_offsets"])
        assert (np.diff(found["key_offsets"][rows:]) == 0).all()
        assert (found["key_blocks"][len(arrays["key_blocks"]) :] == (ROWS, 0)).all()


@pytest.mark.parametrize("size", SIZES)
def test_padding_alone(size: PrefillSize) -> None:
    form = PrefillForm(SIZES, SINK_ROW, SINK_AT)
    form.fill(SIZES[-1], laid_out(SIZES[-1], [150, 20], [3, 70], [10, 77]))
    form.clear(size)
    found = columns(form, size)
    assert found["seq_cu"].tolist() == [0] * (ROWS + 1) + [size.num_tokens]
    assert (found["seq_of"] == ROWS).all()
    assert not found["write_slots"].any()
    assert not found["seq_slots"].any()
    chunks = -(-size.num_tokens // 64)
    assert found["seq_chunk_offsets"].tolist() == [0] * (ROWS + 1) + [chunks]


def test_what_does_not_fit_changes_nothing() -> None:
    size = SIZES[-1]
    form = PrefillForm(SIZES, SINK_ROW, SINK_AT)
    before = form.numbers.copy()
    for counts, saves in (
        ([193], []),
        ([30] * (ROWS + 1), []),
        ([150], list(range(1, SAVES + 2))),
        ([150], list(range(3, 3 * (EXTRA_CHUNKS + 2), 3))),
    ):
        arrays = laid_out(size, counts, [0] * len(counts), saves)
        assert not form.fill(size, arrays), (counts, saves)
        assert np.array_equal(form.numbers, before)
    long = laid_out(size, [10], [64 * 12], [])
    assert not form.fill(size, long), "more keys than are copied"
    assert np.array_equal(form.numbers, before)


def test_arrays_of_every_size_begin_where_the_largest_begins() -> None:
    form = PrefillForm(SIZES, SINK_ROW, SINK_AT)
    static = torch.from_numpy(form.numbers)
    largest = form.columns(static, SIZES[-1])
    for size in SIZES:
        for name, array in form.columns(static, size).items():
            assert array.data_ptr() == largest[name].data_ptr()
            assert (array.data_ptr() - static.data_ptr()) % 16 == 0
            assert array.is_contiguous()
