"""The generic hybrid decoder: embedding, layers, final norm, head.

A layer is a mixer and an MLP, each x + f(norm(x)), or one of the two.

Owns: which layers in which order, and which tokens go through the end of the last one.
Does not know: files, weights' names, batches, pools' sizes.
Invariants:
- Activations are of type ``ops.dtype``, states float32.
- Behind the last mixer tokens are alone: those that nobody asks for go no further.
Read next: ``builder.py``, ``layers/``, ``draft_heads.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels.attention.queries import WantedTokens
from hyradix.kernels.ops import Array, Ops
from hyradix.layers.context import ForwardContext
from hyradix.layers.embedding import Embedding
from hyradix.layers.norm import RmsNorm
from hyradix.models.config import ModelConfig
from hyradix.models.draft_heads import DraftHead


class Mixer(Protocol):
    """What mixes tokens; it reads and writes this layer's memory."""

    def mix(
        self, x: Array, norm: RmsNorm, context: ForwardContext, wanted: WantedTokens | None = None
    ) -> Array:
        """``[T, hidden]`` -> mixer(norm(x)) before its last product, ``[T, W]``.

        wanted: M tokens of which alone that is asked for, ``[M, W]``.
        """

    def add(self, mixed: Array, x: Array) -> Array:
        """``mix``'s result and x, or the same rows of both -> x + mixer(norm(x)).

        Effects: may overwrite both.
        """


class FeedForward(Protocol):
    """What works on each token alone."""

    def forward(self, x: Array, norm: RmsNorm) -> Array:
        """``[T, hidden]`` -> x + f(norm(x))."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A mixer, then an MLP, each with its norm; a layer may lack one of them."""

    mixer: tuple[RmsNorm, Mixer] | None
    mlp: tuple[RmsNorm, FeedForward] | None

    def forward(self, x: Array, context: ForwardContext) -> Array:
        """``[T, hidden]`` -> ``[T, hidden]``."""
        if self.mixer is not None:
            norm, mixer = self.mixer
            x = mixer.add(mixer.mix(x, norm, context), x)
        return self.feed_forward(x)

    def feed_forward(self, x: Array) -> Array:
        """The part behind the mixer: ``[T, hidden]`` -> ``[T, hidden]``."""
        if self.mlp is not None:
            norm, mlp = self.mlp
            x = mlp.forward(x, norm)
        return x


class Decoder:
    """A loaded model. ``config`` and ``ops`` are public; weights are not to be touched.

    ``draft_head`` shares the embedding; None unless it was asked for.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: RmsNorm,
        weight_bytes: int,
        draft_head: DraftHead | None = None,
    ) -> None:
        self.config = config
        self.ops = ops
        self.weight_bytes = weight_bytes
        self.draft_head = draft_head
        self._embedding = embedding
        self._layers = layers
        mixing = [i for i, layer in enumerate(layers) if layer.mixer is not None]
        self._last_mixer = mixing[-1]
        self._norm = norm

    def forward(
        self,
        token_ids: npt.NDArray[np.int32],
        context: ForwardContext,
        wanted: WantedTokens | None = None,
    ) -> Array:
        """Ids ``[T]`` (Triton: or on the device) -> hidden ``[T, hidden]`` before the final norm.

        wanted: M tokens of which alone they are asked for: ``[M, hidden]``.
        Effects: writes the KV slots and state slots that ``context`` names.
        """
        x = self._embedding.embed(token_ids)
        if wanted is None:
            for layer in self._layers:
                x = layer.forward(x, context)
            return x
        for layer in self._layers[: self._last_mixer]:
            x = layer.forward(x, context)
        return self._finish(x, context, wanted)

    def _finish(self, x: Array, context: ForwardContext, wanted: WantedTokens) -> Array:
        """From the last mixer on."""
        last, *behind = self._layers[self._last_mixer :]
        assert last.mixer is not None
        norm, mixer = last.mixer
        mixed = mixer.mix(x, norm, context, wanted)
        x = self.ops.select(x, wanted.index)
        if not len(x):
            return x
        x = last.feed_forward(mixer.add(mixed, x))
        for layer in behind:
            x = layer.feed_forward(x)
        return x

    def warm_up(self, context: ForwardContext) -> Array:
        """Run one layer of each kind: all kernels that there are, but for the head's."""
        tokens = np.zeros(len(context.queries.positions), np.int32)
        x = self._embedding.embed(tokens)
        for kind in dict.fromkeys(self.config.blocks):
            self._layers[self.config.blocks.index(kind)].forward(x, context)
        return x

    def normalize(self, hidden: Array) -> Array:
        """``[M, hidden]`` of ``forward`` -> h, what draft heads take: after the final norm."""
        return self.ops.norm(hidden, self._norm.packed)

    def logits(self, hidden: Array, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """``[M, hidden]`` of ``forward`` -> float32 ``[M, vocab]``, in ``out`` if given."""
        return self._embedding.logits(hidden, self._norm, out=out)
