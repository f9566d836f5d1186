"""A forward over the device's own forms: nothing is asked of the host, nothing new is reserved."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hyradix.kernels.attention.triton import DeviceQueries, query_blocks, tokens_per_block
from hyradix.kernels.device_forms import (
    DeviceRoots,
    DeviceRows,
    DeviceSingles,
    DeviceStates,
    DeviceTokens,
)
from hyradix.kernels.triton_table import attend_config
from hyradix.layers.context import ForwardContext
from tests.kernels.triton_kernels.ops_cases import int32, offsets
from tests.kernels.triton_kernels.test_triton_ops_mixers import rows
from tests.support.player import Player
from tests.support.triton_models import load

WAITING = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "nonzero")


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Raises where the package (the interpreter may) turns a tensor into something of the host."""
    patch = pytest.MonkeyPatch()
    for name in WAITING:
        plain = getattr(torch.Tensor, name)

        def watched(self, *args, plain=plain, name=name, **kwargs):
            assert "hyradix" not in sys._getframe(1).f_code.co_filename.split("/"), name
            return plain(self, *args, **kwargs)

        patch.setattr(torch.Tensor, name, watched)
    try:
        if device.type == "cuda":
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
                torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        patch.undo()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("has_log", [False, True])
def test_a_forward_waits_for_nothing_and_reserves_nothing(tmp_path, device, has_log):
    model = load(tmp_path, "triton", str(device), "bfloat16")
    runner = Player(model, keep_logits=False, decode_log=4 if has_log else 0).runner
    runner.pools.states.clear_sink()
    for tensor in (*runner.pools.states.tensors, runner.pools.kv.k, runner.pools.kv.v):
        tensor.zero_()

    def on(values: object) -> torch.Tensor:
        return torch.from_numpy(int32(values)).to(device)

    table = on([[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 10, 11]])
    config = attend_config(device, rows=10, programs=2, dim=8, itemsize=2)
    cu = offsets([5, 1, 1])
    queries = DeviceQueries(
        on(cu), on([0, 1, 0]), on([0, 4, -1]),
        on(query_blocks(cu, int32([0, 4, -1]), tokens_per_block(config, 2))), table,
    )  # fmt: skip
    places = on([*range(5), 4, 0]), on([1, 2, 3, 4, 5, 10, 0])
    tokens = DeviceTokens.whole(*places, queries, config)
    prefill = DeviceStates.of(rows([1], int32([5]), [(0, 3, 4)]), device)
    slots = on([2, 0])  # the last row is padding
    singles = None if has_log else DeviceSingles(5, slots)
    roots = DeviceRoots(5, slots, on([1, 0]), on([0, 0])) if has_log else None
    context = ForwardContext(
        DeviceRows(prefill, singles), tokens, runner.pools.memory, roots,
        runner.speculation.spec_layers,
    )  # fmt: skip
    reserved, ids = model.ops.reserve(8, 4), on([3, 1, 4, 1, 5, 9, 0])
    index = on([4, 5])
    with torch.inference_mode(), no_waiting(device):
        hidden = model.forward(ids, context)
        logits = model.logits(model.ops.select(hidden, index))
    assert logits.isfinite().all()
    assert logits.dtype == torch.float32
    assert model.ops.reserve(8, 4) == reserved
