"""What memory and arithmetic alone would take, and the figures to beat of shapes that are known.

Floor of a decode step = [weight bytes touched + batch x (state bytes x (1 + writes a step) +
context x KV bytes)] / read bandwidth; of a prefill = 2 operations for each weight and token over
the rate of a large product.

Owns: these sums, ``Known`` figures. Does not know: clocks, engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hyradix.models.config import ModelConfig
from hyradix.models.registry import FAMILIES
from hyradix.models.shapes import Shapes, expected_shapes


@dataclass(frozen=True, slots=True)
class Known:
    """Figures of one shape on one H200 (PERFORMANCE.md, section 4); milliseconds by batch.

    peer: vLLM 0.26.0, float32 states (bfloat16 at batch 8).
    """

    peer_ms: Mapping[int, float] = field(default_factory=dict)
    target_ms: Mapping[int, float] = field(default_factory=dict)
    aim_ms: Mapping[int, float] = field(default_factory=dict)
    peer_prefill: float = 0.0
    target_prefill: float = 0.0
    target_ratio: float = 0.0
    target_ready_s: float = 0.0


_SHAPE_4B = Known(
    peer_ms={1: 3.62, 8: 4.13, 64: 7.06, 256: 19.5},
    target_ms={1: 3.1, 8: 3.7, 64: 5.8, 256: 12.5},
    aim_ms={1: 2.6, 8: 3.0, 64: 4.6, 256: 9.8},
    peer_prefill=61_000,
    target_prefill=64_000,
    target_ratio=13,
    target_ready_s=30,
)
_KEYS_4B = (2560, 9216, 32, 151_936)


def known_figures(config: ModelConfig, device: str) -> Known | None:
    """What there is to beat; None on other shapes and devices."""
    keys = (config.hidden_size, config.intermediate_size, len(config.layers), config.vocab_size)
    return _SHAPE_4B if keys == _KEYS_4B and device == "cuda" else None


@dataclass(frozen=True, slots=True)
class Floors:
    """Of one model. state_bytes, kv_bytes: of one slot of each pool."""

    config: ModelConfig
    weight_item_bytes: int
    state_bytes: int
    kv_bytes: int

    def decode_bytes(self, batch: int, context: float, num_log_rows: int) -> float:
        """Bytes that a decode step moves at least."""
        writes = 1 / num_log_rows if num_log_rows else 1.0
        row = self.state_bytes * (1 + writes) + context * self.kv_bytes
        return self._touched(batch) * self.weight_item_bytes + batch * row

    def prefill_operations(self, num_tokens: int, num_rows: int) -> float:
        """Of the products with weights alone; logits are computed for one token of each row."""
        head = math.prod(self._shapes["model.embed_tokens.weight"])
        return 2.0 * (num_tokens * (self._active() - head) + num_rows * head)

    @property
    def _shapes(self) -> Shapes:
        return expected_shapes(self.config, FAMILIES[self.config.family])

    def _touched(self, batch: int) -> float:
        """Weights that are read: an embedding by rows, of experts those that are chosen."""
        moe, total = self.config.moe, 0.0
        for name, shape in self._shapes.items():
            count = float(math.prod(shape))
            if name == "model.embed_tokens.weight" and not self.config.is_tied:
                continue
            if moe is not None and ".mlp.experts." in name:
                count *= 1 - (1 - moe.top_k / moe.num_experts) ** batch
            total += count
        return total

    def _active(self) -> float:
        """Weights that one token is multiplied with, the head included."""
        return self._touched(1)
