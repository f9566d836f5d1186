"""What a checkpoint's config.json says, in our words, whatever its family calls it.

Owns: ``CacheConfig`` (what a model remembers) and ``ModelConfig`` (all of it), reading values with
clear errors. Does not know: weights, devices, torch.
Read next: ``registry.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hyradix.errors import ModelLoadError
from hyradix.state_bytes import RecurrentShape

LayerKind = Literal["recurrent", "attention"]
RawConfig = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """What a hybrid decoder keeps of a sequence: enough to plan memory, whatever its MLPs are.

    ``layers`` says which mixer stands where.
    """

    family: str
    architecture: str
    layers: tuple[LayerKind, ...]
    max_position: int
    num_kv_heads: int
    head_dim: int
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    """K: taps of the short convolution; the window holds K - 1 columns."""

    @property
    def num_attention_layers(self) -> int:
        """L_a."""
        return self.layers.count("attention")

    @property
    def num_recurrent_layers(self) -> int:
        """L_r."""
        return self.layers.count("recurrent")

    @property
    def conv_channels(self) -> int:
        """C: channels of q, k and v."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    def kv_bytes_per_slot(self, element_bytes: int) -> int:
        """K and V of one token in all attention layers."""
        return 2 * self.num_attention_layers * self.num_kv_heads * self.head_dim * element_bytes

    def recurrent_shape(self, element_bytes: int) -> RecurrentShape:
        """The recurrent layers; states, u and gates are float32, ``element_bytes`` is the rest's.

        Float32 gates and u: what is folded into a state must be exact (DESIGN 6.1).
        """
        return RecurrentShape(
            num_layers=self.num_recurrent_layers,
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            k_dim=self.k_dim,
            v_dim=self.v_dim,
            conv_channels=self.conv_channels,
            conv_width=self.conv_width,
            k_bytes=element_bytes,
            v_bytes=element_bytes,
            conv_bytes=element_bytes,
        )

    @property
    def state_bytes_per_slot(self) -> int:
        """Float32 recurrent state and conv window of one sequence in all recurrent layers."""
        return self.recurrent_shape(4).slot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(CacheConfig):
    """A hybrid decoder that can be loaded. Every layer has an MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    eps: float
    is_tied: bool
    num_heads: int
    rotary_dim: int
    rope_theta: float
    eos_token_ids: tuple[int, ...] = ()
    draft_intermediate_sizes: dict[str, int] = field(default_factory=dict)
    """Of the draft heads whose MLP is of another size than the target's."""


def require(raw: RawConfig, key: str, kind: type) -> Any:
    """A value that config.json must have. Raises ``ModelLoadError`` naming the key."""
    value = raw.get(key)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ModelLoadError(f"config.json: {key} must be a {kind.__name__}, got {value!r}")
    return value


def positive(raw: RawConfig, key: str) -> int:
    """A positive integer of config.json."""
    value: int = require(raw, key, int)
    if value < 1:
        raise ModelLoadError(f"config.json: {key} must be positive, got {value}")
    return value


def rope(raw: RawConfig, head_dim: int) -> tuple[float, int]:
    """(theta, rotary dimensions), from ``rope_parameters`` or the older separate keys."""
    parameters: RawConfig = {
        **(raw.get("rope_scaling") or {}),
        **(raw.get("rope_parameters") or {}),
    }
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise ModelLoadError(f"config.json: rope_type {kind!r} is not supported (only 'default')")
    theta: Any = parameters.get("rope_theta", raw.get("rope_theta", 10_000.0))
    factor: Any = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.25))
    dims = int(head_dim * float(factor))
    if dims < 2 or dims % 2 or dims > head_dim:
        raise ModelLoadError(
            f"config.json: partial_rotary_factor {factor} of head_dim {head_dim} gives {dims} "
            "rotary dimensions; an even number is needed"
        )
    return float(theta), dims


def draft_sizes(raw: RawConfig) -> dict[str, int]:
    """``draft_heads``: intermediate sizes by the name of the head, where they are given."""
    heads = require({"draft_heads": {}, **raw}, "draft_heads", dict)
    return {
        str(name): positive(head, "intermediate_size")
        for name, head in heads.items()
        if "intermediate_size" in head
    }


def eos_ids(*sources: RawConfig) -> tuple[int, ...]:
    """End-of-sequence ids from the first source that has them."""
    for source in sources:
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(v) for v in value)
    return ()
