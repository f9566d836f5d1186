"""The numbers of a step of prefill alone in memory of fixed place, padded to a size.

Owns: which array stands where, what padding is, what fits. Does not know: models, launches.

The arrays are those of ``Planner.lay_out`` and ``lay_out_prefill``, by the same names; each is made
as long as the size allows. Tokens of padding stand at the end and are one more sequence, the last:
of state slot 0, so that it starts from nothing and leaves nothing, and from position -n on (of n
tokens), so that it sees no key. Between it and the rows that there are stand empty sequences.

Invariants:
- An array of any size begins where the largest begins, so one layout serves all sizes.
- Padding reads and writes nothing that is alive: KV and state slot 0, the sink row of the tables.
- Every token is in one chunk and in one block of queries: what layers hand on is all written.
Read next: ``device_batch.py`` (what is padded), ``device_prefill.py`` (who runs it), ``graphs.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hyradix.kernels.attention.triton import cut
from hyradix.kernels.attention.triton_gather import KEYS_PER_BLOCK
from hyradix.kernels.gated_delta_rule.triton import CHUNK
from hyradix.request import SINK
from hyradix.runner.staging import aligned

EXTRA_CHUNKS = 12
"""Chunks beside those of ``CHUNK`` tokens: the last of a row, and those that a save cuts off."""
SAVES = 16
Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class PrefillSize:
    """num_tokens: that it holds; num_rows: rows that prefill. tokens_per_block: of queries.
    num_keys: that may be copied to one place; 0: attention reads them slot by slot."""

    num_tokens: int
    num_rows: int
    tokens_per_block: int
    num_keys: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all arrays."""
        tokens, rows = self.num_tokens, self.num_rows
        sequences = rows + 1
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("positions", "write_slots", "token_at", "seq_of"), (tokens,)),
            **dict.fromkeys(("last", "last_rows", "last_positions", "next_at"), (rows,)),
            **dict.fromkeys(("seq_rows", "seq_starts", "seq_slots"), (sequences,)),
            **dict.fromkeys(_OFFSETS, (sequences + 1,)),
            **dict.fromkeys(("seq_save_at", "seq_save_slots"), (SAVES,)),
            "seq_blocks": (-(-tokens // self.tokens_per_block) + sequences, 2),
            "seq_chunks": (tokens // CHUNK + EXTRA_CHUNKS, 3),
        }
        if self.num_keys:
            shapes["key_blocks"] = (self.num_keys // KEYS_PER_BLOCK + rows, 2)
            shapes["key_offsets"] = (sequences + 1,)
        return shapes


_OFFSETS = ("seq_cu", "seq_save_offsets", "seq_chunk_offsets", "key_offsets")
_WIDE = ("token_at", "next_at")


class PrefillForm:
    """The host's side: ``numbers`` is what ``Staging`` sends as its fixed part."""

    def __init__(self, sizes: Sequence[PrefillSize], sink_row: int, sink_at: int) -> None:
        """sink_row: of the tables. sink_at: where it begins in the token table."""
        most: dict[str, tuple[int, ...]] = {}
        for size in sizes:
            for name, shape in size.shapes.items():
                most[name] = max(most.get(name, shape), shape)
        self._places: dict[str, int] = {}
        total = 0
        for name, shape in most.items():
            self._places[name] = total
            total += aligned(int(np.prod(shape)) * (2 if name in _WIDE else 1))
        self.numbers = np.zeros(total, np.int32)
        self._padding = {
            **dict.fromkeys(("write_slots", "seq_slots", "seq_save_slots"), SINK),
            **dict.fromkeys(("seq_rows", "last_rows"), sink_row),
            "last_positions": -1,
            "token_at": sink_at,
            "next_at": sink_at + 1,
        }
        self._arrays = {
            size: {name: self._array(name, shape) for name, shape in size.shapes.items()}
            for size in sizes
        }

    def _array(self, name: str, shape: tuple[int, ...]) -> Numbers:
        first, count = self._places[name], int(np.prod(shape))
        if name in _WIDE:
            return self.numbers[first : first + 2 * count].view(np.int64)
        return self.numbers[first : first + count].reshape(shape)

    def clear(self, size: PrefillSize) -> None:
        """Padding alone."""
        pairs = {name: np.zeros((0, 2), np.int32) for name in ("seq_blocks", "key_blocks")}
        none = {name: np.zeros(1, np.int32) for name in _OFFSETS}
        self.fill(size, {**pairs, **none, "seq_chunks": np.zeros((0, 3), np.int32)})

    def fill(self, size: PrefillSize, arrays: Mapping[str, Numbers]) -> bool:
        """Write the arrays (one that is left out is empty) and padding. False: they do not fit,
        and nothing was written."""
        to, given = self._arrays[size], {**arrays, **_last_sequence(size, arrays)}
        if any(len(given.get(name, ())) > len(whole) for name, whole in to.items()):
            return False
        num_padding = size.num_tokens - int(arrays["seq_cu"][-1])
        nothing = {"seq_blocks": (size.num_rows, num_padding), "key_blocks": (size.num_rows, 0)}
        for name, whole in to.items():
            numbers = given.get(name, whole[:0])
            whole[: len(numbers)] = numbers
            whole[len(numbers) :] = nothing.get(name, self._padding.get(name, 0))
        return True

    def columns(self, static: torch.Tensor, size: PrefillSize) -> dict[str, torch.Tensor]:
        """Views of the arrays in ``Staging.static``."""
        found = {}
        for name, shape in size.shapes.items():
            first, count = self._places[name], int(np.prod(shape))
            if name in _WIDE:
                found[name] = static[first : first + 2 * count].view(torch.int64)
            else:
                found[name] = static[first : first + count].view(shape)
        return found


def _last_sequence(size: PrefillSize, arrays: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """The arrays that tell of the tokens that pad a step, with them; the others know no tokens."""
    last, first = size.num_rows, int(arrays["seq_cu"][-1])
    count = size.num_tokens - first
    begins = np.arange(0, count, CHUNK)
    chunks = np.stack([first + begins, np.minimum(CHUNK, count - begins), 0 * begins], 1)
    blocks = cut(np.array([count]), size.tokens_per_block)
    blocks[:, 0] = last
    found = {
        "seq_chunks": np.concatenate([arrays["seq_chunks"], chunks]),
        "seq_blocks": np.concatenate([arrays["seq_blocks"], blocks]),
        "seq_of": _up_to(arrays.get("seq_of", begins[:0]), size.num_tokens, last),
        "seq_starts": _up_to(arrays.get("seq_starts", begins[:0]), last + 1, 0, -count),
    }
    ends = {"seq_cu": size.num_tokens, "seq_chunk_offsets": len(found["seq_chunks"])}
    for name in _OFFSETS:
        if name in arrays:
            end = arrays[name][-1]
            found[name] = _up_to(arrays[name], last + 2, end, ends.get(name, end))
    return found


def _up_to(numbers: Numbers, length: int, value: int, final: int | None = None) -> Numbers:
    """Of that length at least, by repeating ``value``; ``final`` is the last."""
    rest = np.full(max(length - len(numbers), 0), value)
    if final is not None and len(rest):
        rest[-1] = final
    return np.concatenate([numbers, rest])
