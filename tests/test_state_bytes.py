"""What each mode takes: computed equals allocated, and DESIGN section 6's table at full size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hyradix.kernels.memory import physical_bytes
from hyradix.state_bytes import MODES, RecurrentShape, SpecShape, buffers, conv_bytes, spec_bytes

GIB = 1 << 30
SMALL = RecurrentShape(
    num_layers=3, num_k_heads=2, num_v_heads=4, k_dim=8, v_dim=5, conv_channels=52, conv_width=4
)
LARGE = RecurrentShape(
    num_layers=24,
    num_k_heads=16,
    num_v_heads=32,
    k_dim=128,
    v_dim=128,
    conv_channels=8192,
    conv_width=4,
    k_bytes=2,
    v_bytes=2,
    conv_bytes=2,
)
"""A 9B model's recurrent layers: bf16 conv and k, float32 state and u."""
DRAFTS = SpecShape(num_requests=32, num_nodes=63, num_log_rows=16, max_accepted=7)
DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


def allocated(mode, model, spec, device):
    return {
        buffer.name: torch.empty(buffer.shape, dtype=DTYPES[buffer.element_bytes], device=device)
        for buffer in buffers(mode, model, spec)
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_channel_decay", [False, True])
@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("hidden_size", [0, 24])
def test_computed_equals_allocated(mode, has_channel_decay, is_chain, hidden_size):
    model = replace(SMALL, has_channel_decay=has_channel_decay, hidden_size=hidden_size)
    spec = SpecShape(num_requests=2, num_nodes=8, num_log_rows=6, max_accepted=4, is_chain=is_chain)
    tensors = allocated(mode, model, spec, "cpu")
    assert physical_bytes(*tensors.values()) == spec_bytes(mode, model, spec).peak
    assert (
        tensors["conv"].shape[-2]
        == {
            ("snapshot", True): 8 + 2,
            ("snapshot", False): 3 + 8,
            ("replay", True): 3 + 8,
            ("replay", False): 3 + 8,
            ("log", True): 3 + 6 + 8,
            ("log", False): 3 + 6 + 8,
        }[mode, is_chain]
    )
    assert tensors["conv"].nbytes == conv_bytes(
        model,
        spec if mode == "log" else replace(spec, num_log_rows=0),
        sliding=mode == "snapshot" and is_chain,
    )
    assert ("hidden" in tensors) == bool(hidden_size and mode != "snapshot")


@pytest.mark.parametrize("mode", MODES)
def test_full_size_on_the_meta_device(mode):
    tensors = allocated(mode, LARGE, DRAFTS, "meta")
    assert physical_bytes(*tensors.values()) == spec_bytes(mode, LARGE, DRAFTS).peak


def test_the_ratios_that_the_modes_are_for():
    snapshot, replay, log = (spec_bytes(mode, LARGE, DRAFTS) for mode in MODES)
    states = buffers("snapshot", LARGE, DRAFTS)[0]
    assert states.num_bytes == 24 * 33 * 63 * 2 * (1 << 20)
    assert round(states.num_bytes / GIB) == 97
    assert snapshot.resident == snapshot.peak
    assert replay.peak * 13 <= states.num_bytes
    assert log.resident * 150 <= states.num_bytes
    assert "states" not in {buffer.name for buffer in buffers("log", LARGE, DRAFTS)}
    assert log.resident < replay.peak < snapshot.peak


@pytest.mark.parametrize("num_nodes", [3, 7, 63])
def test_the_states_are_as_many_times_the_working_state_as_there_are_nodes(num_nodes):
    """The known table 3x, 7x, 63x: its nodes do not count the root, its sink row apart."""
    spec = SpecShape(num_requests=32, num_nodes=num_nodes)
    working = 24 * 32 * (2 << 20)
    states = buffers("snapshot", LARGE, spec)[0]
    assert states.num_bytes * 32 == num_nodes * working * 33


def test_bytes_by_hand():
    """Every term of the table, N = 2, T = 8, R = 6, A = 4."""
    spec = SpecShape(num_requests=2, num_nodes=8, num_log_rows=6, max_accepted=4)
    state, column = 4 * 8 * 5 * 4, 52 * 4
    held = (2 * 8 + 4 * 5 + 4 + 4) * 4  # k, v, g, beta
    row = (2 * 8 + 4 * 5 + 4) * 4  # k, u, g
    snapshot, replay, log = (spec_bytes(mode, SMALL, spec) for mode in MODES)
    assert snapshot.peak == snapshot.resident == 3 * 3 * (8 * state + 11 * column)
    assert snapshot.written == 3 * 2 * 8 * (state + column)
    assert replay.resident == 3 * 3 * (4 * held + (3 + 4) * column)
    assert replay.peak == 3 * 8 * state + 3 * 3 * (8 * held + 11 * column)
    assert replay.written == 3 * 2 * 8 * (state + held + column)
    assert log.resident == 3 * 3 * (6 * row + (3 + 6) * column)
    assert log.peak == 3 * 3 * (14 * row + 17 * column)
    assert log.written == 3 * 2 * 8 * (row + column)
