"""Weights that stay in their files until a layer is built of them.

Owns: reading one weight, whole or put together from pieces. Does not know: headers, names, layers.
Invariant: a weight is read into memory of its own, aligned as torch aligns; no file is mapped, so
that no page of one stays resident, and a load holds what is built and one layer's sources.
Read next: ``checkpoint.py`` (where they lie), ``builder.py`` (who reads them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from hyradix.errors import ModelLoadError
from hyradix.models.pieces import Piece, Shape


class Stored(Protocol):
    """A weight that can be read."""

    @property
    def shape(self) -> Shape: ...

    def read(self) -> torch.Tensor:
        """A fresh tensor, of the stored type. Raises ``ModelLoadError``."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor: the bytes of ``path`` from ``first_byte`` on, in C order."""

    path: Path
    first_byte: int
    shape: Shape
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """See ``Stored``."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        if not tensor.numel():
            return tensor
        left = tensor.reshape(-1).view(torch.uint8).numpy().data
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.first_byte)
                while len(left) and (count := file.readinto(left)):
                    left = left[count:]
        except OSError as error:
            raise ModelLoadError(f"{self.path} cannot be read: {error}") from error
        if len(left):
            raise ModelLoadError(f"{self.path} is damaged: it ends before its last weight")
        return tensor


@dataclass(slots=True)
class StackedTensor:
    """A weight of all experts of which a checkpoint has each expert's part."""

    shape: Shape
    parts: list[tuple[Piece, Stored]] = field(default_factory=list)

    def read(self) -> torch.Tensor:
        """See ``Stored``. One piece at a time is there twice."""
        whole: torch.Tensor | None = None
        for piece, stored in self.parts:
            part = stored.read()
            if whole is None:
                whole = part.new_empty(self.shape)
            whole[piece.expert, piece.first : piece.first + len(part)] = part
        assert whole is not None, "a stacked weight has pieces"
        return whole


@dataclass(frozen=True, slots=True)
class Counted:
    """``stored``, and who is told each time it was read."""

    stored: Stored
    on_read: Callable[[], None]

    @property
    def shape(self) -> Shape:
        """See ``Stored``."""
        return self.stored.shape

    def read(self) -> torch.Tensor:
        """See ``Stored``."""
        tensor = self.stored.read()
        self.on_read()
        return tensor


Source = torch.Tensor | Stored
"""A weight that is there, or that will be read."""
Sources = dict[str, Source]


def read(source: Source) -> torch.Tensor:
    """The tensor itself."""
    return source if isinstance(source, torch.Tensor) else source.read()
