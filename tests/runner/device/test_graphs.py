"""The ladder of decode sizes and the static memory that they read."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from hyradix.device_bytes import ladder, prefill_ladder
from hyradix.request import SINK
from hyradix.runner.decode_form import DecodeForm
from hyradix.runner.graphs import Graphs, capture_all, uncollected

CPU = torch.device("cpu")
NOTHING = (lambda size: None, lambda size: None)


def test_the_ladder() -> None:
    assert ladder(1) == (1,)
    assert ladder(3) == (1, 2, 3)
    assert ladder(24) == (1, 2, 4, 8, 16, 24)
    assert ladder(100) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)
    assert len(ladder(256)) == 23
    assert ladder(256)[-1] == 256


@pytest.mark.parametrize("max_rows", [1, 5, 64, 100])
def test_every_number_of_rows_has_the_least_size_that_holds_it(max_rows: int) -> None:
    graphs = Graphs(CPU, ladder(max_rows), *NOTHING)
    for count in range(1, max_rows + 1):
        size = graphs.size_for(count)
        assert size is not None
        assert size == min(s for s in ladder(max_rows) if s >= count)
    assert graphs.size_for(max_rows + 1) is None
    assert Graphs(CPU, (), *NOTHING).size_for(1) is None


def test_the_largest_is_captured_first_and_progress_is_told() -> None:
    ran: list[tuple[str, int]] = []
    told: list[tuple[int, int]] = []

    def kind(name: str, sizes: tuple[int, ...]) -> Graphs:
        def run(size: int) -> None:
            ran.append((name, size))

        return Graphs(CPU, sizes, run, lambda size: ran.append(("clear", size)))

    decodes, prefill = kind("decode", ladder(8)), kind("prefill", (16, 32))
    capture_all([decodes, prefill, kind("none", ())], lambda *news: told.append(news))
    expected = [("prefill", n) for n in (32, 16)] + [("decode", n) for n in (8, 4, 2, 1)]
    assert ran[1::2] == expected
    assert ran[::2] == [("clear", size) for _, size in expected]
    assert told == [(i, 6) for i in range(7)]
    decodes.replay(4)
    assert ran[-1] == ("decode", 4)
    ran.clear()
    prefill.rehearse()
    assert ran == [("clear", 32), ("prefill", 32), ("clear", 16), ("prefill", 16)]


def test_prefill_sizes() -> None:
    assert prefill_ladder(15) == ()
    assert prefill_ladder(16) == (16,)
    assert prefill_ladder(200) == (16, 32, 64, 128, 192)
    assert prefill_ladder(8192)[-1] == 1024


def filled(count: int, *, max_rows: int = 6) -> tuple[DecodeForm, torch.Tensor]:
    form = DecodeForm(max_rows, 6, 60)
    numbers = np.arange(1, count + 1, dtype=np.int32)
    form.fill(
        numbers - 1, numbers + 10, numbers + 20, numbers + 30, numbers + 40,
        numbers.astype(np.int64) + (1 << 40), numbers.astype(np.int64) + (1 << 41),
    )  # fmt: skip
    return form, torch.from_numpy(form.numbers.copy())


def test_rows_stand_in_their_columns_and_the_rest_is_sinks() -> None:
    form, static = filled(3)
    columns = form.columns(static, 5)
    assert columns.rows.tolist() == [0, 1, 2, 6, 6]
    assert columns.starts.tolist() == [11, 12, 13, -1, -1]
    assert columns.positions.tolist() == [11, 12, 13, 0, 0]
    assert columns.write_slots.tolist() == [21, 22, 23, SINK, SINK]
    assert columns.slots.tolist() == [31, 32, 33, SINK, SINK]
    assert columns.log_rows.tolist() == [1, 2, 3, 0, 0]
    assert columns.num_log_rows.tolist() == [41, 42, 43, 0, 0]
    assert columns.token_at.tolist() == [(1 << 40) + i for i in (1, 2, 3)] + [60, 60]
    assert columns.next_at.tolist() == [(1 << 41) + i for i in (1, 2, 3)] + [61, 61]


def test_a_smaller_step_leaves_nothing_of_a_larger_one() -> None:
    form, _ = filled(5)
    small, _ = filled(2)
    numbers = np.arange(1, 3, dtype=np.int32)
    wide = numbers.astype(np.int64)
    form.fill(
        numbers - 1, numbers + 10, numbers + 20, numbers + 30, numbers + 40,
        wide + (1 << 40), wide + (1 << 41),
    )  # fmt: skip
    assert np.array_equal(form.numbers, small.numbers)
    form.clear()
    assert np.array_equal(form.numbers, DecodeForm(6, 6, 60).numbers)


def test_columns_of_every_size_begin_where_the_largest_begins() -> None:
    form, static = filled(6)
    for size in range(7):
        for column, largest in zip(
            vars_of(form, static, size), vars_of(form, static, 6), strict=True
        ):
            assert column.data_ptr() == largest.data_ptr() or size == 0
            assert column.data_ptr() % 16 == static.data_ptr() % 16 or size == 0


def vars_of(form: DecodeForm, static: torch.Tensor, size: int) -> list[torch.Tensor]:
    columns = form.columns(static, size)
    return [getattr(columns, name) for name in type(columns).__slots__]


def test_nothing_is_collected_inside_a_capture() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own = self

    def make_garbage() -> None:
        for _ in range(5 * gc.get_threshold()[0]):
            Cycle()

    collections: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        collections.append(phase)

    gc.callbacks.append(note)
    try:
        make_garbage()
        assert collections
        collections.clear()
        with uncollected():
            make_garbage()
            assert not collections
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(note)
