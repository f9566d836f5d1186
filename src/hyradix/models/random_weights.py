"""Weights for a config whose checkpoint is not there, drawn where they will be used.

Owns: the distributions (those that models are initialised with), and what is drawn of a seed.
Does not know: which weights a model has, what is built of them.
Invariants: a weight depends on the seed, its name, its type and the kind of device alone, not on
which others were drawn before; nothing is drawn before it is read, so that a load holds one layer's
weights beside what is built.
Read next: ``stored.py`` (the other kind of source), ``builder.py`` (who reads them).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from hyradix.models.pieces import Shape
from hyradix.models.shapes import Shapes
from hyradix.models.stored import Stored

_STD = 0.02
_DECAYS = (0.01, 16.0)
_ONES = ("dt_bias", "linear_attn.norm.weight", "mamba.norm.weight", "mamba.D")


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A weight that is drawn when it is read (see ``stored.Stored``).

    dtype: of what has rows and columns; vectors and what makes decays are float32.
    is_centred: norms are stored less 1.
    """

    name: str
    shape: Shape
    seed: int
    device: torch.device
    dtype: torch.dtype
    is_centred: bool

    def read(self) -> torch.Tensor:
        """A fresh tensor on the device; the same values every time."""
        is_decay = self.name.endswith("A_log")
        is_small = is_decay or len(self.shape) < 2
        dtype = torch.float32 if is_small else self.dtype
        tensor = torch.empty(self.shape, dtype=dtype, device=self.device)
        if is_decay:
            return tensor.uniform_(*_DECAYS, generator=self._generator()).log_()
        if self.name.endswith(_ONES):
            return tensor.fill_(1.0)
        if self.name.endswith("norm.weight"):
            return tensor.fill_(0.0 if self.is_centred else 1.0)
        return tensor.normal_(0.0, _STD, generator=self._generator())

    def _generator(self) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.seed}:{self.name}".encode(), digest_size=7).digest()
        seed = int.from_bytes(digest, "little")
        return torch.Generator(self.device).manual_seed(seed)


def random_sources(
    shapes: Shapes,
    *,
    seed: int,
    is_centred: bool,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Stored]:
    """A source for every weight of ``shapes``, by flat name."""
    return {
        name: RandomTensor(name, shape, seed, device, dtype, is_centred)
        for name, shape in shapes.items()
    }
