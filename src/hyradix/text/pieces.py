"""Which tokenizers work piece by piece, and a memory of pieces already tokenised.

Owns: the proof that a text may be cut at its control tokens and each piece tokenised by itself,
and the least-recently-used store of pieces. A long prompt that begins as an earlier one did is
then tokenised by looking its pieces up.
Does not know: what a chat is.
Invariant: tokenising piece by piece equals tokenising the whole, id for id.
Read next: ``tokenizer.py``.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import tokenizers

from hyradix.request import Int32Array

_LOCAL_PRE_TOKENIZERS = {
    "Split",
    "ByteLevel",
    "Digits",
    "Punctuation",
    "Whitespace",
    "WhitespaceSplit",
    "BertPreTokenizer",
}
_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"}


def _components(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The members of a pipeline part, sequences unfolded."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for key in ("pretokenizers", "normalizers", "decoders", "processors"):
        for member in part.get(key, ()):
            yield from _components(member)


def is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether tokens are byte strings in the GPT-2 alphabet, and decoding joins these bytes."""
    decoder = json.loads(backend.to_str())["decoder"]
    return [part["type"] for part in _components(decoder)] == ["ByteLevel"]


def control_pattern(backend: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """A pattern that finds what the tokenizer cuts out of the raw text first; None if unsafe.

    The tokenizer looks for its non-normalised added tokens first (the leftmost, of several the
    longest), and treats what lies between by itself. The pattern repeats that search. It is only
    given when nothing reaches across a cut: no token strips its neighbourhood or asks for word
    borders, and neither normaliser nor pre-tokeniser looks at what precedes its piece.
    """
    spec = json.loads(backend.to_str())
    added = [token for token in spec["added_tokens"] if not token["normalized"]]
    if not added or not all(token["content"] for token in added):
        return None
    if any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in added):
        return None
    if spec["model"].get("type") != "BPE" or spec["model"].get("dropout"):
        return None
    if any(part["type"] not in _LOCAL_NORMALIZERS for part in _components(spec["normalizer"])):
        return None
    for part in _components(spec["pre_tokenizer"]):
        if part["type"] not in _LOCAL_PRE_TOKENIZERS or part.get("add_prefix_space"):
            return None
    texts = sorted((token["content"] for token in added), key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in texts))


class PieceCache:
    """Token ids of recent pieces, least recently used out first; bounded by characters."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._ids: OrderedDict[str, Int32Array] = OrderedDict()

    def get(self, piece: str) -> Int32Array | None:
        """The ids of ``piece`` (read-only), or None."""
        ids = self._ids.get(piece)
        if ids is not None:
            self._ids.move_to_end(piece)
        return ids

    def put(self, piece: str, ids: Int32Array) -> None:
        """Remember a piece that ``get`` did not know."""
        if len(piece) > self._max_chars // 4:
            return
        ids.flags.writeable = False
        self._ids[piece] = ids
        self._num_chars += _cost(piece)
        while self._num_chars > self._max_chars:
            old, _ = self._ids.popitem(last=False)
            self._num_chars -= _cost(old)


def _cost(piece: str) -> int:
    return len(piece) + 64
