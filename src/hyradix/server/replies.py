"""Replies on the wire: OpenAI's objects and our extra fields, encoded by msgspec.

Owns: names and order of the fields. Does not know: how a reply comes about.
Invariant: a field that a client did not ask for and OpenAI does not have is absent (UNSET), a
field that OpenAI has is there, if only as null.
Read next: ``completions.py``, ``chat.py``.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from hyradix.request import MissReason

PromptLogprobsWire = list[dict[str, "PromptLogprobWire"] | None]


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Where the prompt's tokens came from, and why no more of them came from the cache."""

    cached_tokens: int = 0
    kv_tokens: int = 0
    """Depth to which the KV was there; the state may have been there less deep."""
    miss_reason: MissReason = MissReason.NONE


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a request. An end-of-sequence token counts as a completion token."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprobWire(msgspec.Struct, kw_only=True):
    """One candidate at one prompt position; keyed by its token id."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """The logprobs of /v1/completions. Offsets count from the start of ``text``."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One choice of a completion, or what is new of it in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsWire | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A completion, or a chunk of one (they have one shape)."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    """An alternative of one position. ``bytes`` is the token's text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, kw_only=True):
    """One token of a chat reply."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """The logprobs of a chat choice."""

    content: list[ChatLogprob]


class ChatMessage(msgspec.Struct, kw_only=True):
    """The assistant's message."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatDelta(msgspec.Struct, kw_only=True):
    """What is new of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One choice of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsWire | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """What is new of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsWire | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole chat completion."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(msgspec.Struct, kw_only=True):
    """A chunk of a streamed chat completion."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """One entry of /v1/models."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "hyradix"
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """/v1/models."""

    object: str = "list"
    data: list[ModelCard]


class Tokenized(msgspec.Struct, kw_only=True):
    """/tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(msgspec.Struct, kw_only=True):
    """/detokenize."""

    prompt: str


def encode(reply: Any) -> bytes:
    """A reply as JSON."""
    return msgspec.json.encode(reply)
