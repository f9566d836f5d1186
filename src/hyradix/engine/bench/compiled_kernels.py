"""The CPU's compiled kernels at a model's shape: checked against float64, and what is timed.

Owns: ``CompiledKernels``, a ``cases.Section``. Does not know: models (it is told a shape), clocks.
Decode steps only: products with the weights, a gated delta net's step, attention over KV slots, and
the short convolution alone, which is part of that step.
Read next: ``cases.py``, ``kernels/compiled_ops.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hyradix.engine.bench.cases import BATCHES, Bench, Call, Check, Checks
from hyradix.engine.bench.conv_rows import conv_rows
from hyradix.kernels.attention import reference as attention_reference
from hyradix.kernels.attention.queries import RaggedQueries
from hyradix.kernels.attention.reference import AttentionWeights
from hyradix.kernels.causal_conv.reference import causal_conv
from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates, mix
from hyradix.kernels.rotary.reference import rotary_table

CONTEXT = 1152
"""Columns a decoding row sees: as in the GPU's benches."""
_LIMIT = 1e-5
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Sizes of one model's layers."""

    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    width: int

    @property
    def channels(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def projected(self) -> int:
        return self.channels + self.v_heads * self.v_dim + 2 * self.v_heads


@dataclass(frozen=True, slots=True)
class _Case:
    """One call and its float64 twin: both return outputs that must agree."""

    run: Callable[[], np.ndarray]
    expected: Callable[[], torch.Tensor]


class CompiledKernels:
    """See the module's docstring."""

    def __init__(self, shape: KernelShape, *, num_threads: int = 1) -> None:
        self._shape = shape
        self._ops = CompiledOps()
        self._ops.set_num_threads(num_threads)

    def checks(self, device: torch.device) -> Iterator[Checks]:
        """One call of each on fresh inputs; outputs only (states have tests of their own)."""
        for name, make, _ in self._kinds():
            yield Checks(name, partial(_checks, name, make))

    def benches(self, device: torch.device, *, tune: bool) -> Iterator[Bench]:
        """At every batch size; there is nothing to tune."""
        for name, make, num_bytes in self._kinds():
            for batch in BATCHES:
                yield Bench(name, batch, num_bytes(batch), _builder(make, batch))

    def _kinds(self) -> Iterator[tuple[str, Callable[[int], _Case], Callable[[int], int]]]:
        """Name, how to make a case of so many rows, the bytes that it moves at least."""
        s = self._shape
        products = (
            ("linear, gdn in", s.hidden, s.projected),
            ("linear, up", s.hidden, 2 * s.intermediate),
            ("linear, down", s.intermediate, s.hidden),
            ("linear, head", s.hidden, s.vocab),
        )
        for name, size, outputs in products:
            yield (
                name,
                lambda n, i=size, o=outputs: self._linear(n, i, o),  # type: ignore[misc]
                lambda n, i=size, o=outputs: 4 * (i * o + n * (i + o)),  # type: ignore[misc]
            )
        state = 4 * s.v_heads * s.k_dim * s.v_dim
        window = 4 * (s.width - 1) * s.channels
        token = 4 * (s.projected + s.v_heads * s.v_dim)
        yield "gdn step", self._step, lambda n: n * (2 * (state + window) + token)
        kv = 4 * CONTEXT * 2 * s.kv_heads * s.head_dim
        yield "attention decode", self._attention, lambda n: n * kv
        yield "conv", self._conv, lambda n: n * (2 * window + 8 * s.channels)

    def _linear(self, batch: int, size: int, outputs: int) -> _Case:
        x, weight = torch.randn(batch, size), torch.randn(outputs, size)
        packed, array = self._ops.pack_linear(weight), x.numpy()
        return _Case(
            lambda: self._ops.linear(array, packed), lambda: x.double() @ weight.double().T
        )

    def _step(self, batch: int) -> _Case:
        s = self._shape
        weights = MixerWeights(
            s.k_heads, torch.randn(s.channels, s.width) * 0.5, -torch.rand(s.v_heads),
            torch.randn(s.v_heads), torch.randn(s.v_dim), _EPS,
        )  # fmt: skip
        rows = np.arange(batch + 1, dtype=np.int32)
        none = np.zeros(0, np.int32)
        states = RaggedStates(rows, rows[:batch] + 1, np.zeros_like(rows), none, none)
        projected = torch.randn(batch, s.projected)
        conv = torch.randn(batch + 1, s.width - 1, s.channels)
        state = torch.randn(batch + 1, s.v_heads, s.k_dim, s.v_dim)
        packed = self._ops.pack_mixer(weights)
        arrays = projected.numpy(), conv.numpy(), state.numpy()

        def expected() -> torch.Tensor:
            wide = MixerWeights(
                s.k_heads, weights.conv.double(), weights.decay_rate.double(),
                weights.dt_bias.double(), weights.norm.double(), _EPS,
            )  # fmt: skip
            return mix(projected.double(), wide, states, conv.double(), state.double())

        return _Case(lambda: self._ops.mix(arrays[0], packed, states, *arrays[1:]), expected)

    def _attention(self, batch: int) -> _Case:
        s = self._shape
        ones = torch.ones(s.head_dim)
        angles = rotary_table(CONTEXT, s.head_dim // 4 * 2, 10_000.0)
        weights = AttentionWeights(s.heads, s.kv_heads, s.head_dim, _EPS, ones, ones, angles)
        table = np.arange(1, batch * CONTEXT + 1, dtype=np.int32).reshape(batch, CONTEXT)
        rows = np.arange(batch, dtype=np.int32)
        positions = np.full(batch, CONTEXT - 1, np.int32)
        queries = RaggedQueries.singles(rows, positions, table[:, -1].copy(), table)
        x = torch.randn(batch, 2 * (s.heads + s.kv_heads) * s.head_dim)
        k, v = (torch.randn(batch * CONTEXT + 1, s.kv_heads, s.head_dim) for _ in "kv")
        packed = self._ops.pack_attention(weights)
        arrays = x.numpy(), k.numpy(), v.numpy()

        def expected() -> torch.Tensor:
            return attention_reference.attention(
                x.double(), weights, queries, k.double(), v.double()
            )

        return _Case(lambda: self._ops.attention(arrays[0], packed, queries, *arrays[1:]), expected)

    def _conv(self, batch: int) -> _Case:
        channels, width = self._shape.channels, self._shape.width
        x, weight = torch.randn(batch, channels), torch.randn(channels, width)
        windows = torch.randn(batch + 1, width - 1, channels)
        slots = np.arange(1, batch + 1, dtype=np.int64)
        scratch = np.empty(width * channels, np.float32)
        out, segments = np.empty((batch, channels), np.float32), np.array([[0, channels]])
        taps, state, columns = weight.T.contiguous().numpy(), windows.numpy(), x.numpy()
        before = windows.double()

        def run() -> np.ndarray:
            conv_rows(columns, slots, taps, state, scratch, out, segments)
            return out

        def expected() -> torch.Tensor:
            pieces = [
                causal_conv(x[i : i + 1].double(), weight.double(), before[i + 1])[0]
                for i in range(batch)
            ]
            return torch.cat(pieces)

        return _Case(run, expected)


def _checks(name: str, make: Callable[[int], _Case]) -> Iterator[Check]:
    for batch in (1, 5):
        case = make(batch)
        expected, found = case.expected(), torch.from_numpy(case.run()).double()
        error = float((found - expected).norm() / expected.norm())
        yield Check(f"{name}, {batch} rows", error if error == error else np.inf, _LIMIT)


def _builder(make: Callable[[int], _Case], batch: int) -> Callable[[int], list[Call]]:
    return lambda sets: [make(batch).run for _ in range(sets)]
