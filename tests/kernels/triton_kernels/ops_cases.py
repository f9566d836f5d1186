"""Both backends beside each other: the same weights, pools and inputs, as torch's and Triton's see
them. torch works in float32 on the host, on numbers that Triton's type can hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hyradix.kernels.attention.queries import RaggedQueries
from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates
from hyradix.kernels.kda.reference import KdaWeights
from hyradix.kernels.mamba2.reference import Mamba2Weights
from hyradix.kernels.torch_ops import TorchOps
from hyradix.kernels.tree_recurrence.ragged import FlatTrees, RaggedTrees, taps_of
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.triton_ops import TritonOps
from tests.kernels.triton_kernels.cases import NAN, error

LIMIT = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}
WIDTH, LOG = 4, 3


def int32(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def offsets(counts: Any) -> np.ndarray:
    return int32(np.concatenate([[0], np.cumsum(counts)]))


@dataclass
class Both:
    """One backend each; ``both`` makes a tensor for either."""

    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.twin, self.ours = TorchOps(), TritonOps(self.device, self.dtype)

    def pair(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
        """What torch takes, what Triton takes (in ``dtype``, its own unless told)."""
        own = x.to(dtype or self.dtype)
        return own.float(), own.to(self.device, copy=True)

    def normal(self, *shape: int) -> tuple[Any, Any]:
        return self.pair(torch.randn(shape))

    def check(self, ours: Any, twin: Any) -> None:
        assert error(self.ours.tensor(ours).float(), twin) < LIMIT[self.dtype]


@dataclass(frozen=True)
class Layer:
    """A recurrent layer: ``sizes`` of what a token brings; Hk, Hv, dk, dv."""

    weights: Any
    sizes: tuple[int, ...]
    hk: int
    hv: int
    dk: int
    dv: int

    @property
    def channels(self) -> int:
        return 2 * self.hk * self.dk + self.hv * self.dv

    @property
    def is_kda(self) -> bool:
        return isinstance(self.weights, KdaWeights)

    @property
    def dg(self) -> int:
        return self.dk if self.is_kda else 1

    def pack(self, ops: Any) -> Any:
        return ops.pack_kda(self.weights) if self.is_kda else ops.pack_mixer(self.weights)

    def mix(self, ops: Any, given: list[Any], *rest: Any) -> Any:
        return (ops.mix_kda if self.is_kda else ops.mix)(*given, *rest)

    def mix_trees(self, ops: Any, given: list[Any], *rest: Any) -> None:
        (ops.mix_kda_trees if self.is_kda else ops.mix_trees)(*given, *rest)


def layer_of(family: str) -> Layer:
    torch.manual_seed(1)
    hk, hv, dk, dv = {"gdn": (2, 4, 6, 10), "kda": (2, 2, 5, 7), "mamba2": (1, 3, 6, 9)}[family]
    channels, values = 2 * hk * dk + hv * dv, hv * dv
    conv, norm = torch.randn(channels, WIDTH) * 0.5, torch.randn(dv)
    rate, bias = torch.rand(hv) * 2, torch.randn(hv)
    weights: Any
    if family == "gdn":
        weights = MixerWeights(hk, conv, -rate, bias, norm, 1e-6)
        return Layer(weights, (channels + values + 2 * hv,), hk, hv, dk, dv)
    if family == "kda":
        weights = KdaWeights(hv, conv, rate, torch.randn(hv * dk), norm, 1e-6)
        return Layer(weights, (channels + hv, hv * dk, values), hk, hv, dk, dv)
    weights = Mamba2Weights(
        hk, conv, torch.randn(channels), -rate, bias, (0.0, float("inf")), torch.randn(hv),
        torch.randn(values), 1, 1e-6,
    )  # fmt: skip
    return Layer(weights, (channels + values + hv,), hk, hv, dk, dv)


class MixerPair:
    """A layer in both backends, on pools of NaN but for ``slots`` in use."""

    def __init__(self, both: Both, family: str, used: list[int], *, num_slots: int = 9) -> None:
        self.both, self.layer = both, layer_of(family)
        layer = self.layer
        self.weights = layer.pack(both.twin), layer.pack(both.ours)
        conv = torch.full((num_slots, WIDTH - 1, layer.channels), NAN)
        state = torch.full((num_slots, layer.hv, layer.dk, layer.dv), NAN)
        conv[used], state[used] = torch.randn(conv[used].shape), torch.randn(state[used].shape)
        self.conv, self.state = both.pair(conv), both.pair(state, torch.float32)

    def tokens(self, count: int) -> tuple[list[Any], list[Any]]:
        pairs = [self.both.normal(count, size) for size in self.layer.sizes]
        return [x for x, _ in pairs], [x for _, x in pairs]

    def mix(self, given: Any, batch: RaggedStates, forms: Any = None) -> tuple[Any, Any]:
        """Outputs; ``forms``: what Triton takes instead of the host's batch."""
        layer, both = self.layer, self.both
        twin = layer.mix(both.twin, given[0], self.weights[0], batch, self.conv[0], self.state[0])
        ours = layer.mix(
            both.ours, given[1], self.weights[1], forms or batch, self.conv[1], self.state[1]
        )
        return twin, ours

    def check_pools(self) -> None:
        for twin, ours in (self.conv, self.state):
            assert torch.equal(twin.isnan(), ours.isnan().cpu())
            self.both.check(ours.nan_to_num(), twin.nan_to_num())

    def spec(self, mode: Any, counts: np.ndarray, num_nodes: int) -> tuple[SpecLayer, SpecLayer]:
        """Buffers of NaN but for the valid log rows of request row i + 1."""
        layer, num = self.layer, len(counts) + 1
        rows = LOG + num_nodes if mode == "log" else num_nodes
        shapes = {
            "k": (rows, layer.hk, layer.dk), "v": (rows, layer.hv, layer.dv),
            "g": (rows, layer.hv, layer.dg), "beta": (rows, layer.hv),
            "states": (num_nodes, layer.hv, layer.dk, layer.dv),
            "conv": (WIDTH - 1 + rows, layer.channels),
        }  # fmt: skip
        whole = {name: torch.full((num, *shape), NAN) for name, shape in shapes.items()}
        for row, count in enumerate(counts.tolist(), 1):
            for name in ("k", "v", "g"):
                whole[name][row, :count] = torch.randn(whole[name][row, :count].shape) * 0.3
            whole["g"][row, :count] = -whole["g"][row, :count].abs()
            columns = whole["conv"][row, WIDTH - 1 : WIDTH - 1 + count]
            columns.copy_(torch.randn(columns.shape))
        names = {"log": "kvg", "replay": ("states", "k", "v", "g", "beta"), "snapshot": ["states"]}
        found = []
        for side in (0, 1):
            arrays = {n: self.both.pair(whole[n], torch.float32)[side] for n in names[mode]}
            if mode == "log":
                arrays["u"] = arrays.pop("v")
            num_log_rows = LOG if mode == "log" else 0
            spec = SpecLayer(
                mode=mode, conv=self.both.pair(whole["conv"])[side],
                first_node=WIDTH - 1 + num_log_rows, num_log_rows=num_log_rows, **arrays,
            )  # fmt: skip
            found.append(spec)
        return found[0], found[1]


def ragged_trees(
    parents: list[list[int]], slots: Any, counts: np.ndarray, spec: SpecLayer, first: int
) -> RaggedTrees:
    """Trees whose tokens follow ``first`` others, request i in buffer row i + 1."""
    sizes = [len(tree) for tree in parents]
    flat = FlatTrees.of(offsets(sizes), int32([parent for tree in parents for parent in tree]))
    num_log_rows = counts if spec.mode == "log" else counts * np.int32(0)
    taps = taps_of(flat, num_log_rows, width=WIDTH, first_node=spec.first_node, first_row=WIDTH - 1)
    rows = np.arange(1, len(parents) + 1, dtype=np.int32)
    begin = offsets(sizes)[:-1] + np.int32(first)
    return RaggedTrees(flat, begin, int32(slots), rows, num_log_rows, taps)


class KvPair:
    """KV pools of NaN, a table of scattered slots, whose columns before ``starts`` are filled."""

    def __init__(self, both: Both, starts: list[int], shape: tuple[int, int]) -> None:
        self.both = both
        order = np.random.default_rng(0).permutation(np.arange(1, 4 * 48 + 1))
        self.table = order.astype(np.int32).reshape(4, 48)
        pools = [torch.full((4 * 48 + 1, *shape), NAN) for _ in "kv"]
        for row, start in enumerate(starts):
            for pool in pools:
                filled = torch.from_numpy(self.table[row, :start]).long()
                pool[filled] = torch.randn(start, *shape)
        self.k, self.v = (both.pair(pool) for pool in pools)

    def batch(
        self, rows: Any, starts: Any, counts: Any, trees: FlatTrees | None = None
    ) -> RaggedQueries:
        rows, starts, counts = int32(rows), int32(starts), int32(counts)
        cu = offsets(counts)
        columns = np.arange(cu[-1], dtype=np.int32) + np.repeat(starts - cu[:-1], counts)
        slots = self.table[np.repeat(rows, counts), columns]
        positions = columns.copy()
        if trees is not None:
            sizes = np.diff(trees.cu_nodes)
            tree_starts = np.repeat(starts[len(starts) - len(sizes) :], sizes)
            positions[len(positions) - len(trees.parents) :] = tree_starts + trees.depths
        return RaggedQueries.of(cu, rows, starts, positions, slots, self.table, trees=trees)

    def check(self) -> None:
        for twin, ours in (self.k, self.v):
            assert torch.equal(twin.isnan(), ours.isnan().cpu())
            self.both.check(ours.nan_to_num(), twin.nan_to_num())


def with_columns(batch: RaggedQueries, paths: list[list[int]]) -> RaggedQueries:
    """Trees of one node each, which see these columns behind their start."""
    tails = np.concatenate([int32(p) + s for p, s in zip(paths, batch.starts, strict=True)])
    return replace(batch, tail_offsets=offsets([len(p) for p in paths]), tail_columns=int32(tails))
