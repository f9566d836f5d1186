"""From a decoded HTTP request to engine requests: the part that all endpoints share.

Owns: the model's names, prompt limits, the fan-out over prompts and n, seeds and request ids.
Does not know: HTTP, wire formats, how the engine is reached.
Invariant: what leaves here cannot be refused by the engine for its form, only for its size or
because the queue is full.
Read next: ``generation.py`` (what comes back), ``completions.py``, ``chat.py``.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from hyradix.engine.fan_out import fan_out
from hyradix.engine.messages import CacheView, EngineInfo, EngineStats
from hyradix.errors import (
    ContextLengthError,
    HyradixError,
    InvalidParameterError,
    ModelNotFoundError,
)
from hyradix.request import Boundary, Int32Array, Namespace, Request, SamplingParams
from hyradix.server.generation import Generation, Outputs
from hyradix.server.metrics import ServerMetrics

T = TypeVar("T")

OFF_LOOP_CHARACTERS = 1 << 16
CHARACTERS_PER_MESSAGE = 16
"""About what a template adds to a message; many small messages are much text too."""
NORMALISATION_SLACK = 4
"""A tokenizer's normalisation may shorten a text; by no more than this."""
MAX_TOKENIZE_CHARACTERS = 1 << 22
"""What /tokenize takes at once."""
"""Text longer than this is tokenised in a thread, so that other streams go on meanwhile."""
MAX_FAN_OUT = 1024
"""Choices of one HTTP request (prompts times n)."""


class Tokenizer(Protocol):
    """``hyradix.text.Tokenizer`` as the server uses it."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def longest_token(self) -> int: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> Int32Array: ...
    def decode(
        self, ids: Sequence[int] | Int32Array, *, skip_special_tokens: bool = True
    ) -> str: ...


class Rendered(Protocol):
    """``hyradix.text.RenderedPrompt`` as the server uses it."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Any: ...
    @property
    def boundaries(self) -> tuple[Boundary, ...]: ...


class ChatTemplate(Protocol):
    """``hyradix.text.ChatTemplate`` as the server uses it."""

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered: ...


class Client(Protocol):
    """``engine.client.EngineClient`` as the server uses it."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def error(self) -> HyradixError | None: ...
    def generate(self, *requests: Request) -> Outputs: ...
    async def stats(self) -> EngineStats: ...
    async def cache_view(self) -> CacheView: ...
    async def flush_cache(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What the server itself can be told."""

    served_model_name: str
    model_aliases: frozenset[str] = frozenset()
    """Other names under which requests may ask for the model."""
    api_key: str | None = None
    max_body_bytes: int = 32 << 20
    cors_origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt. ``text`` is None where the caller gave token ids."""

    token_ids: Int32Array
    boundaries: tuple[Boundary, ...] = ()
    text: str | None = None


class Frontend:
    """What the endpoints have in common; one per server."""

    def __init__(
        self,
        client: Client,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        config: ServerConfig,
        metrics: ServerMetrics,
        *,
        draw_seed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.template = template
        self.config = config
        self.metrics = metrics
        self._draw_seed = draw_seed
        self._clock = clock

    @property
    def info(self) -> EngineInfo:
        """What the engine told when it became ready."""
        return self.client.info

    def check_model(self, name: str | None) -> None:
        """Raise ``ModelNotFoundError`` unless ``name`` is one of this model's (or absent)."""
        known = {self.config.served_model_name, *self.config.model_aliases}
        if name is not None and name not in known:
            raise ModelNotFoundError(
                f"the model '{name}' does not exist; this server has "
                f"'{self.config.served_model_name}'",
                param="model",
            )

    # ---- prompts ---------------------------------------------------------------------------------

    async def prompt_of_text(self, text: str, *, add_special_tokens: bool) -> Prompt:
        """Tokenise. Raises ``InvalidParameterError`` for an empty prompt."""
        self._refuse_hopeless(len(text), "prompt")
        token_ids = await self._encode(text, add_special_tokens)
        return self._checked(Prompt(token_ids, text=text), "prompt")

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of any text, also an empty one or one past the context."""
        if len(text) > MAX_TOKENIZE_CHARACTERS:
            raise InvalidParameterError(
                f"prompt has {len(text)} characters; at most {MAX_TOKENIZE_CHARACTERS} are "
                "tokenized at once",
                param="prompt",
            )
        token_ids: list[int] = (await self._encode(text, add_special_tokens)).tolist()
        return token_ids

    async def _encode(self, text: str, add_special_tokens: bool) -> Int32Array:
        return await _off_loop(
            len(text), partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        )

    def prompt_of_ids(self, ids: Sequence[int]) -> Prompt:
        """Check token ids against the vocabulary. Raises ``InvalidParameterError``."""
        array = self.checked_ids(ids, "prompt")
        return self._checked(Prompt(array), "prompt")

    def checked_ids(self, ids: Sequence[int], param: str) -> Int32Array:
        """The ids as int32, all inside the vocabulary. Raises ``InvalidParameterError``."""
        vocab_size = self.info.vocab_size
        try:
            array = np.array(ids, dtype=np.int64)
        except OverflowError:
            array = np.array([-1], dtype=np.int64)
        if array.size and not (array.min() >= 0 and array.max() < vocab_size):
            bad = next(i for i in ids if not 0 <= i < vocab_size)
            raise InvalidParameterError(
                f"{param} holds the token id {bad}, which is outside the vocabulary "
                f"(0 to {vocab_size - 1})",
                param=param,
            )
        return array.astype(np.int32)

    async def render(
        self,
        messages: list[dict[str, Any]] | None,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        is_limited: bool = True,
    ) -> Prompt:
        """Render and tokenise messages. Raises ``InvalidParameterError`` for bad ones.

        Raises ``ContextLengthError`` unless ``is_limited`` is off.
        """
        if not messages:
            raise InvalidParameterError("messages must not be empty", param="messages")
        size = sum(
            CHARACTERS_PER_MESSAGE + _num_characters(message.get("content"))
            for message in messages
            if isinstance(message, Mapping)
        )
        if is_limited:
            self._refuse_hopeless(size, "messages")
        rendered = await _off_loop(
            size,
            partial(
                self.template.render,
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                template_kwargs=template_kwargs,
            ),
        )
        token_ids = np.asarray(rendered.token_ids, dtype=np.int32)
        prompt = Prompt(token_ids, tuple(rendered.boundaries), rendered.text)
        return self._checked(prompt, "messages") if is_limited else prompt

    def _refuse_hopeless(self, num_characters: int, param: str) -> None:
        """Raise for a text that is too long whatever its tokens are: tokenising it costs memory
        (hundreds of bytes a token)."""
        at_least = num_characters // (NORMALISATION_SLACK * self.tokenizer.longest_token)
        limit = self.info.max_context
        if at_least >= limit:
            raise ContextLengthError(
                f"the prompt has {num_characters} characters, which is at least {at_least} tokens; "
                f"this model's limit is {limit} tokens for prompt and reply together",
                param=param,
            )

    def _checked(self, prompt: Prompt, param: str) -> Prompt:
        length, limit = len(prompt.token_ids), self.info.max_context
        if length == 0:
            raise InvalidParameterError(f"{param} must not be empty", param=param)
        if length >= limit:
            raise ContextLengthError(
                f"the prompt has {length} tokens; this model's limit is {limit} tokens for prompt "
                "and reply together",
                param=param,
            )
        return prompt

    # ---- generation ------------------------------------------------------------------------------

    def start(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        id_prefix: str,
        salt: str | None,
        drops_tokens: bool = False,
    ) -> Generation:
        """Submit every prompt n times. Raises ``EngineDeadError``, ``InvalidParameterError``.

        Choice ``i`` continues ``prompts[i // n]``. With a seed, its random stream follows from
        (seed, i % n); without one, a seed is drawn.
        """
        if len(prompts) * sampling.n > MAX_FAN_OUT:
            raise InvalidParameterError(
                f"{len(prompts)} prompts times n = {sampling.n} is more than {MAX_FAN_OUT} choices",
                param="n",
            )
        reply_id = f"{id_prefix}-{uuid.uuid4().hex}"
        requests: list[Request] = []
        for number, prompt in enumerate(prompts):
            requests += fan_out(
                prompt.token_ids.astype("<i4").tobytes(),
                sampling,
                id_prefix=f"{reply_id}-{number}",
                seed=self._draw_seed() if sampling.seed is None else sampling.seed,
                boundaries=prompt.boundaries,
                namespace=Namespace(salt=salt or ""),
            )
        return Generation(
            reply_id,
            [r.request_id for r in requests],
            self.client.generate(*requests),
            [len(p.token_ids) for p in prompts],
            self.metrics,
            drops_tokens=drops_tokens,
            clock=self._clock,
        )


def _num_characters(content: Any) -> int:
    """About how much text a message has; its form is not checked yet."""
    if isinstance(content, list):
        return sum(_num_characters(p.get("text")) for p in content if isinstance(p, dict))
    return len(content) if isinstance(content, str) else 0


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if size > OFF_LOOP_CHARACTERS else work()
