"""Convolution over trees and chains: three layouts, the same bits; read-only views."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hyradix.kernels.causal_conv.reference import causal_conv
from hyradix.kernels.causal_conv.sliding import (
    scatter_windows_,
    sliding_columns,
    windows_of,
    write_columns_,
)
from hyradix.kernels.causal_conv.tree import column_index, tree_conv, windows_after_rows, windows_at
from hyradix.kernels.memory import ReadOnly, physical_bytes
from hyradix.kernels.tree_recurrence.topology import PAD, chain_parents
from hyradix.state_bytes import conv_columns
from tests.kernels.tree_recurrence.cases import NAN, TOPOLOGIES, tree_of


def dense_windows(window, rows, x, parents):
    """The twin: a whole window of every node ``[T, C, K-1]``, each from its parent's.

    window ``[C, K-1]``, rows ``[C, R]`` (valid ones), x ``[C, T]``.
    """
    start = torch.cat([window, rows], 1)[:, rows.shape[1] :]
    windows = []
    for node, parent in enumerate(parents):
        before = windows[parent] if parent >= 0 else start
        windows.append(torch.cat([before[:, 1:], x[:, node : node + 1]], 1))
    return torch.stack(windows), start


def dense_conv(window, rows, x, parents, weight, bias):
    windows, start = dense_windows(window, rows, x, parents)
    outputs = []
    for node, parent in enumerate(parents):
        before = windows[parent] if parent >= 0 else start
        taps = torch.cat([before, x[:, node : node + 1]], 1)
        y = sum(
            (taps[:, i] * weight[:, i] for i in range(weight.shape[1])), torch.zeros(len(weight))
        )
        outputs.append(y + bias)
    return torch.stack(outputs)


@pytest.mark.parametrize("kind", TOPOLOGIES)
@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_tree_windows_and_outputs_are_the_dense_ones_bit_by_bit(kind, width, num_rows):
    generator = torch.Generator().manual_seed(width * 10 + num_rows)
    channels, trees = 6, [tree_of(kind, 13, generator), tree_of("random", 9, generator)]
    size = max(map(len, trees)) + 1
    parents = torch.tensor([row + [PAD] * (size - len(row)) for row in trees])
    num_valid = torch.tensor([num_rows, num_rows // 2])
    columns = torch.randn(2, channels, width - 1 + num_rows + size, generator=generator)
    assert columns.shape[2] == conv_columns(size, width, num_log_rows=num_rows, sliding=False)
    weight, bias = torch.randn(channels, width), torch.randn(channels)
    index = column_index(parents, num_valid, num_rows=num_rows, width=width)
    y = tree_conv(columns, index, weight, bias, activation="none")
    for n, row in enumerate(trees):
        window, rows, x = columns[n].split([width - 1, num_rows, size], 1)
        rows = rows[:, : num_valid[n]]
        columns[n, :, width - 1 + int(num_valid[n]) : width - 1 + num_rows] = NAN
        assert torch.equal(y[n, : len(row)], dense_conv(window, rows, x, row, weight, bias))
        dense, start = dense_windows(window, rows, x, row)
        assert torch.equal(
            windows_after_rows(columns[n : n + 1], num_valid[n : n + 1], width=width)[0], start
        )
        for node in range(len(row)):
            after = windows_at(columns[n : n + 1], index[n : n + 1, node, 1:])
            assert torch.equal(after[0], dense[node])


def test_a_chain_is_the_causal_convolution():
    window, x, weight = torch.randn(3, 8), torch.randn(10, 8), torch.randn(8, 4)
    expected, _ = causal_conv(x, weight, window)
    parents = torch.tensor([chain_parents(10)])
    index = column_index(parents, torch.tensor([0]), num_rows=0, width=4)
    y = tree_conv(torch.cat([window, x]).T.unsqueeze(0), index, weight)
    assert torch.allclose(y[0], expected, atol=1e-6)
    plain = tree_conv(torch.cat([window, x]).T.unsqueeze(0), index, weight, activation="none")
    assert torch.equal(F.silu(plain), y)


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 7, 64])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_sliding_windows_are_the_dense_ones_in_fewer_bytes(num_nodes, width):
    requests, channels, parents = 3, 5, chain_parents(num_nodes)
    window = torch.randn(requests, channels, width - 1)
    x = torch.randn(requests, channels, num_nodes)
    columns = sliding_columns((requests, channels), parents, width=width)
    write_columns_(columns, window, x)
    windows = windows_of(columns, width=width)
    no_rows = torch.empty(channels, 0)
    dense = torch.stack(
        [dense_windows(window[n], no_rows, x[n], parents)[0] for n in range(requests)]
    )
    assert windows.shape == dense.shape
    assert torch.equal(windows.clone(), dense)

    count = conv_columns(num_nodes, width, sliding=True)
    assert physical_bytes(windows, columns, windows[0]) == 4 * requests * channels * count
    assert columns.nbytes * num_nodes * (width - 1) == dense.nbytes * (num_nodes + width - 2)

    nodes, slots = torch.tensor([0, num_nodes - 1, num_nodes // 2]), torch.tensor([4, 1, 2])
    pools = [torch.full((6, channels, width - 1), NAN) for _ in range(2)]
    for pool, source in zip(pools, (windows, dense), strict=True):
        scatter_windows_(pool, slots, source, nodes)
    assert torch.equal(pools[0][slots], pools[1][slots])
    assert pools[0][[0, 3, 5]].isnan().all()


def test_bytes_of_the_three_layouts():
    """Exactly half at T = K = 4; a tree takes one column more than a chain."""
    assert conv_columns(4, 4, sliding=True) * 2 == 4 * 3
    for num_nodes in (1, 4, 8, 63):
        assert conv_columns(num_nodes, 4, sliding=True) == num_nodes + 2
        assert conv_columns(num_nodes, 4, sliding=False) == num_nodes + 3


@pytest.mark.parametrize("parents", [[-1, 0, 0], [-1, 0, 1, 1], [0, 1], []])
def test_the_sliding_layout_refuses_trees(parents):
    with pytest.raises(ValueError, match="parents"):
        sliding_columns((2, 3), parents, width=4)


WRITES = {
    "fill": lambda x: x.fill_(0),
    "set": lambda x: x.__setitem__(0, 1.0),
    "set by index": lambda x: x.__setitem__(torch.tensor([1, 0]), 1.0),
    "add": lambda x: x.add_(1),
    "copy": lambda x: x.copy_(torch.zeros(x.shape)),
    "out": lambda x: torch.add(torch.ones(x.shape), 1, out=x),
    "through a view": lambda x: x[1].transpose(0, 1).zero_(),
    "through detach": lambda x: x.detach().zero_(),
    "through view": lambda x: x[0, 0].view(-1).mul_(2),
    "scatter": lambda x: x.index_copy_(0, torch.tensor([0]), torch.zeros(1, *x.shape[1:])),
    "many": lambda x: torch._foreach_add_([x], 1.0),
    "data": lambda x: x.data.zero_(),
    "numpy": lambda x: x.numpy().fill(0),
    "dlpack": lambda x: torch.from_dlpack(x).zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_writing_through_an_overlapping_view_is_refused(write):
    columns = torch.randn(2, 3, 6)
    before = columns.clone()
    with pytest.raises((ValueError, RuntimeError)):
        write(windows_of(columns, width=4))
    assert torch.equal(columns, before)


def test_reading_a_read_only_tensor_gives_plain_results():
    memory = torch.randn(4, 3)
    lent = ReadOnly(memory)
    assert type(lent + 1) is torch.Tensor
    assert type(lent @ torch.ones(3)) is torch.Tensor
    assert type(lent.clone()) is torch.Tensor
    assert isinstance(lent[1:].T, ReadOnly)
    total = torch.zeros(4, 3)
    total += lent
    assert type(total) is torch.Tensor
    assert torch.equal(total, memory)
    memory[0, 0] = 7
    assert float(lent[0, 0]) == 7
    assert repr(lent).startswith("ReadOnly(tensor(")
