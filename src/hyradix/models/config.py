"""What a checkpoint's config.json says, in our words, whatever its family calls it.

Owns: ``CacheConfig`` (what a model remembers) and ``ModelConfig`` (all of it), reading values with
clear errors. Does not know: weights, devices, torch.
Read next: ``registry.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from hyradix.errors import ModelLoadError
from hyradix.state_bytes import RecurrentShape

LayerKind = Literal["recurrent", "attention", "none"]
"""What mixes the tokens of a layer; none: the layer is its MLP alone."""
MlpKind = Literal["dense", "moe", "none"]
Activation = Literal["swiglu", "relu2"]
Recurrence = Literal["gdn", "kda", "mamba2"]
"""The rule of the recurrent layers, see ``kernels.tree_recurrence.rules``."""
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
    recurrence: Recurrence = "gdn"
    """Of all recurrent layers. Mamba2: key heads are groups, k is B, v is x."""
    has_latent_kv: bool = False
    """One row of ``head_dim`` numbers is all that is kept of a token (``num_kv_heads`` is 1)."""

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
        """K and V of one token in all attention layers, or its latent rows."""
        parts = 1 if self.has_latent_kv else 2
        return parts * self.num_attention_layers * self.num_kv_heads * self.head_dim * element_bytes

    def recurrent_shape(self, element_bytes: int) -> RecurrentShape:
        """The recurrent layers; columns and hidden states take ``element_bytes`` an element.

        Float32 states, k, u, v and gates: what goes into a state must be exact (DESIGN 6.1).
        """
        return RecurrentShape(
            num_layers=self.num_recurrent_layers,
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            k_dim=self.k_dim,
            v_dim=self.v_dim,
            conv_channels=self.conv_channels,
            conv_width=self.conv_width,
            has_channel_decay=self.recurrence == "kda",
            conv_bytes=element_bytes,
            hidden_bytes=element_bytes,
        )

    @property
    def state_bytes_per_slot(self) -> int:
        """Float32 recurrent state and conv window of one sequence in all recurrent layers."""
        return self.recurrent_shape(4).slot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The mixture of experts of the layers that have one: ``top_k`` of ``num_experts`` a token.

    expert_size, shared_size: intermediate sizes; 0: there is no shared expert. latent_size: the
    width that routed experts work on, None: the hidden size. has_bias: a correction of scores, for
    the choice only. The others as in ``kernels.moe.reference.Routing``.
    """

    num_experts: int
    top_k: int
    expert_size: int
    shared_size: int = 0
    has_shared_gate: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    is_normalised: bool = True
    scale: float = 1.0
    latent_size: int | None = None

    def __post_init__(self) -> None:
        """Raises ``ModelLoadError`` for experts that cannot be chosen so."""
        size, rest = divmod(self.num_experts, self.num_groups)
        is_wrong = rest or size < 2 or not 1 <= self.top_groups <= self.num_groups
        if self.num_groups > 1 and is_wrong:
            raise ModelLoadError(
                f"config.json: {self.num_experts} experts cannot be {self.num_groups} groups of "
                f"two or more, of which {self.top_groups} are chosen"
            )
        most = self.num_experts if self.num_groups == 1 else size * self.top_groups
        if not 1 <= self.top_k <= most:
            raise ModelLoadError(
                f"config.json: {self.top_k} experts for each token, of {most} that can be chosen"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """What varies between Mamba2 layers. dt_limits: time steps are clamped to them.

    num_norm_groups: equal parts of the gated output, each normalised by itself.
    """

    has_conv_bias: bool
    dt_limits: tuple[float, float]
    num_norm_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Attention to latent rows: ``rank`` numbers that keys and values are made of, then ``shared``
    numbers of every head's key. nope: numbers of a head's key made of the rank. v_dim: of a value.
    """

    rank: int
    shared: int
    nope: int
    v_dim: int
    eps: float
    """Of the norm of the rank's numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(CacheConfig):
    """A hybrid decoder that can be loaded. ``mlps`` says which MLP stands in which layer.

    activation: of dense MLPs and experts alike. attention: gated has an output gate and norms of q
    and k, plain has neither; attention_scale: of scores, None: head_dim ** -0.5. latent: of
    attention to latent KV, which is neither. rotary_dim: 0 where attention knows no positions.
    decay_bound: the (negative) bound of log decays by channel, None: there is none.
    has_fused_gate_up: checkpoints store the gates and ups of dense MLPs as one matrix.
    has_centred_norms: norm weights are stored less 1, the mixer's apart.
    """

    vocab_size: int
    hidden_size: int
    mlps: tuple[MlpKind, ...]
    intermediate_size: int
    """Of dense MLPs; 0: there are none."""
    activation: Activation = "swiglu"
    has_fused_gate_up: bool = False
    moe: MoeConfig | None = None
    mamba2: Mamba2Config | None = None
    latent: LatentConfig | None = None
    decay_bound: float | None = None
    attention: Literal["gated", "plain"] = "gated"
    attention_scale: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    has_centred_norms: bool = False
    eps: float
    is_tied: bool
    num_heads: int
    rotary_dim: int
    rope_theta: float
    eos_token_ids: tuple[int, ...] = ()
    draft_intermediate_sizes: dict[str, int] = field(default_factory=dict)
    """Of the draft heads whose MLP is of another size than the target's."""

    @property
    def blocks(self) -> tuple[tuple[LayerKind, MlpKind], ...]:
        """Mixer and MLP of each layer."""
        return tuple(zip(self.layers, self.mlps, strict=True))


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


def number(raw: RawConfig, key: str, default: float) -> float:
    """A number of config.json; null is the default too."""
    value = raw.get(key)
    result: float = require({key: default if value is None else value}, key, float)
    return result


def only(raw: RawConfig, key: str, *allowed: Any) -> None:
    """Raises ``ModelLoadError`` where the key is there with another value than those."""
    if key in raw and raw[key] not in allowed:
        raise ModelLoadError(f"config.json: {key} {raw[key]!r} is not supported")


def parse_layers(
    kinds: list[str], count: int, known: dict[str, LayerKind]
) -> tuple[LayerKind, ...]:
    """``layer_types`` in our words. Raises ``ModelLoadError`` for others, or another count."""
    unknown = sorted({str(kind) for kind in kinds} - set(known))
    if unknown or len(kinds) != count:
        raise ModelLoadError(
            f"config.json: layer_types must name {count} layers out of "
            f"{', '.join(sorted(known))}; got {len(kinds)}, unknown: {unknown}"
        )
    return tuple(known[kind] for kind in kinds)


def time_step_limits(raw: RawConfig) -> tuple[float, float]:
    """What Mamba2's time steps are clamped to; null: nothing.

    JSON has no infinity: transformers writes ``{"__float__": "Infinity"}``.
    """
    limits = raw.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    low, high = (
        float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits
    )
    return low, high


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
