"""Stacked expert weights of checkpoints that store each expert on its own.

Owns: which pieces make up a whole, and where each goes. Does not know: files, families.
Wholes: ``...experts.up_proj`` ``[E, I, H]`` (and ``down_proj``), ``...experts.gate_up_proj``
``[E, 2I, H]``. Pieces: ``...experts.7.up_proj.weight`` ``[I, H]``, ``...7.gate_proj.weight``.
Read next: ``loader.py``.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``first : first + shape[0]`` of expert ``expert`` of the weight ``whole``."""

    whole: str
    expert: int
    first: int
    shape: Shape


def pieces_of(name: str, shape: Shape) -> dict[str, Piece]:
    """The pieces of a stacked weight by flat name; none of any other weight."""
    stem, _, part = name.rpartition(".")
    if not stem.endswith(".experts"):
        return {}
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    rows = shape[1] // len(parts)
    return {
        f"{stem}.{expert}.{one}.weight": Piece(name, expert, i * rows, (rows, *shape[2:]))
        for expert in range(shape[0])
        for i, one in enumerate(parts)
    }


def find_pieces(expected: dict[str, Shape], found: Container[str]) -> dict[str, Piece]:
    """Pieces of all stacked weights that are expected and that ``found`` does not have whole."""
    return {
        name: piece
        for whole, shape in expected.items()
        if whole not in found
        for name, piece in pieces_of(whole, shape).items()
    }
