"""A linear layer's weight in the form that multiplies fastest in torch, and nothing else of it.

Owns: the choice between a plain weight and one packed by oneDNN. Does not know: names, layers.
oneDNN's packing operators are private to torch: they are tried once, with ``F.linear`` behind.
Read next: ``compiled.py``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_HINT = 512
"""The number of rows that the packed layout is chosen for; measured best over 8 to 512."""


class PackedLinear:
    """A weight ``[O, I]``, float32 or bfloat16; the original is not kept where it was packed."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.dtype = weight.dtype
        self._packed = _pack(weight)
        self._weight = weight if self._packed is None else None

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x ``[T, I]`` float32 -> ``[T, O]`` float32, plus ``residual``."""
        x = x.to(self.dtype)
        plain = self._weight
        y = _multiply(x, self._packed) if plain is None else F.linear(x, plain)
        y = y.float()
        return y if residual is None else y.add_(residual)


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """oneDNN's copy of the weight, or None where this torch cannot make one."""
    if weight.device.type != "cpu":
        return None
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _HINT)
        _multiply(weight.new_zeros(1, weight.shape[1]), packed)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return packed


def _multiply(x: torch.Tensor, packed: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return y
