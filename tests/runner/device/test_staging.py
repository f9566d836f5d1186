"""The rings of pinned memory: nothing is written while the device may still read it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.runner.staging import ALIGNMENT, DEPTH, Results, Staging

CPU = torch.device("cpu")


class Watch:
    """Fences that note their uses."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.count = 0

    def make(self, device: torch.device):
        watch, number = self, self.count
        self.count += 1

        class Fence:
            def record(self) -> None:
                watch.events.append(("record", number))

            def wait(self) -> None:
                watch.events.append(("wait", number))

        return Fence()


def test_arrays_arrive_with_their_types_and_alignment() -> None:
    staging = Staging(CPU, 8, 64)
    static = np.arange(8, dtype=np.int32)
    arrays = [
        np.arange(5, dtype=np.int32),
        np.array([[1, 2], [3, 1 << 40]], np.int64),
        np.zeros(0, np.int32),
        np.array([0.25, 1e-300]),
        np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
    ]
    views = staging.send(static, arrays)
    assert staging.static.tolist() == static.tolist()
    for view, array in zip(views, arrays, strict=True):
        assert np.array_equal(view.numpy(), array)
        assert view.numpy().dtype == array.dtype
        assert view.data_ptr() % (4 * ALIGNMENT) == staging.static.data_ptr() % (4 * ALIGNMENT)


def test_a_buffer_is_filled_again_only_behind_its_fence() -> None:
    watch = Watch()
    staging = Staging(CPU, 4, 16, fence=watch.make)
    for i in range(3 * DEPTH):
        staging.send(np.full(4, i, np.int32), [])
    turns = [number for kind, number in watch.events if kind == "wait"]
    assert turns == [i % DEPTH for i in range(3 * DEPTH)]
    assert watch.events == [
        event for number in turns for event in (("wait", number), ("record", number))
    ]


def test_a_step_larger_than_planned_finds_room_and_the_front_stays() -> None:
    staging = Staging(CPU, 4, 8)
    address = staging.static.data_ptr()
    for size in (3, 5000, 7, 9000, 2):
        values = np.random.default_rng(size).integers(0, 1 << 30, size).astype(np.int32)
        (view,) = staging.send(np.full(4, size, np.int32), [values])
        assert view.tolist() == values.tolist()
        assert staging.static.tolist() == [size] * 4
    assert staging.static.data_ptr() == address


def test_results_belong_to_their_step() -> None:
    results = Results(CPU, 5)
    device = torch.zeros(2, 5, dtype=torch.int32)
    pending = []
    for i in range(2):
        device.fill_(i)
        pending.append(results.fetch(device[:, : 3 + i]))
    for i, one in enumerate(pending):
        assert one.wait().tolist() == [[i] * (3 + i)] * 2


def test_more_steps_in_flight_than_buffers_are_a_bug() -> None:
    results = Results(CPU, 1)
    device = torch.zeros(2, 1, dtype=torch.int32)
    for _ in range(DEPTH):
        results.fetch(device)
    with pytest.raises(IndexError):
        results.fetch(device)
