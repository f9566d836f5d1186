"""A byte-level tokenizer and a chat template, small enough to compute by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyradix.errors import InvalidParameterError
from hyradix.request import Boundary, BoundaryKind, Int32Array

EOS = 256
VOCAB_SIZE = 257


class FakeTokenizer:
    """Token ids are UTF-8 bytes; 256 is the end of a sequence."""

    vocab_size = VOCAB_SIZE
    longest_token = 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Int32Array:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        special = "" if skip_special_tokens else "<eos>"
        parts = [bytes([i]) if i < EOS else special.encode() for i in np.asarray(ids).tolist()]
        return b"".join(parts).decode(errors="replace")


@dataclass(frozen=True)
class FakeRendered:
    text: str
    token_ids: Int32Array
    boundaries: tuple[Boundary, ...]


class FakeTemplate:
    """``role: content`` lines; then ``assistant: ``."""

    def __init__(self, tokenizer: FakeTokenizer) -> None:
        self._tokenizer = tokenizer

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> FakeRendered:
        lines = [f"tools: {len(tools)}\n"] if tools else []
        lines += [f"{key}={value}\n" for key, value in (template_kwargs or {}).items()]
        for message in messages:
            if not isinstance(message.get("content"), str):
                raise InvalidParameterError("messages: content must be a string", param="messages")
            lines.append(f"{message['role']}: {message['content']}\n")
        text = "".join(lines)
        last = Boundary(len(self._tokenizer.encode(text)), BoundaryKind.LAST)
        text += "assistant: " if add_generation_prompt else ""
        return FakeRendered(text, self._tokenizer.encode(text), (last,))


def load_fake_text(_directory: Path) -> tuple[FakeTokenizer, FakeTemplate]:
    tokenizer = FakeTokenizer()
    return tokenizer, FakeTemplate(tokenizer)
