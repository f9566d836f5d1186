"""POST /v1/chat/completions.

Owns: how messages become a prompt, and the shape of chat completions. Does not know: the engine,
the template's language.
Read next: ``frontend.py``, ``logprobs.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from hyradix.engine.messages import RequestOutput
from hyradix.server.frontend import Frontend, Prompt
from hyradix.server.generation import Generation
from hyradix.server.logprobs import chat_logprobs, prompt_logprobs
from hyradix.server.protocol import ChatRequest, check_chat, sampling_of
from hyradix.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    Usage,
    encode,
)


async def start_chat(
    frontend: Frontend, request: ChatRequest, *, created: int
) -> tuple[Generation, ChatWriter]:
    """Check, render and submit. Raises ``HyradixError``."""
    frontend.check_model(request.model)
    check_chat(request)
    given = request.max_completion_tokens
    sampling = sampling_of(
        request,
        max_tokens=request.max_tokens if given is None else given,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        vocab_size=frontend.info.vocab_size,
        max_context=frontend.info.max_context,
    )
    prompt = await frontend.render(
        request.messages,
        tools=None if request.tool_choice == "none" else request.tools,
        add_generation_prompt=request.add_generation_prompt is not False,
        template_kwargs=request.chat_template_kwargs,
    )
    generation = frontend.start([prompt], sampling, id_prefix="chatcmpl", salt=request.cache_salt)
    model = frontend.config.served_model_name
    return generation, ChatWriter(request, generation.reply_id, prompt, model, created=created)


class ChatWriter:
    """Gives chat completions their wire format. Keeps which choices have begun."""

    def __init__(
        self, request: ChatRequest, reply_id: str, prompt: Prompt, model: str, *, created: int
    ) -> None:
        self._request = request
        self._reply_id = reply_id
        self._prompt = prompt
        self._model = model
        self._created = created
        self._begun: set[int] = set()

    def chunks(self, index: int, output: RequestOutput) -> list[bytes]:
        """See ``ReplyWriter``. The first chunk of a choice has the role and no text."""
        chunks = []
        if index not in self._begun:
            self._begun.add(index)
            first = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
            self._add_prompt(first, output)
            if self._request.return_token_ids:
                first.token_ids = []
            chunks.append(self._chunk([first]))
        wants_ids = self._request.return_token_ids and output.token_ids
        if output.text or output.is_finished or output.logprobs or wants_ids:
            chunks.append(self._chunk([self._delta(index, output)]))
        return chunks

    def usage_chunk(self, usage: Usage) -> bytes:
        """See ``ReplyWriter``."""
        return self._chunk([], usage)

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> bytes:
        """See ``ReplyWriter``."""
        reply = ChatCompletion(
            id=self._reply_id,
            created=self._created,
            model=self._model,
            choices=[self._choice(i, output) for i, output in enumerate(outputs)],
            usage=usage,
        )
        return encode(reply)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        return encode(
            ChatChunk(
                id=self._reply_id,
                created=self._created,
                model=self._model,
                choices=choices,
                usage=usage if self._request.includes_usage else UNSET,
            )
        )

    def _delta(self, index: int, output: RequestOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=output.text) if output.text else ChatDelta(),
            logprobs=None if output.logprobs is None else chat_logprobs(output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._request.return_token_ids else UNSET,
        )

    def _choice(self, index: int, output: RequestOutput) -> ChatChoice:
        choice = ChatChoice(
            index=index,
            message=ChatMessage(content=output.text),
            logprobs=None if output.logprobs is None else chat_logprobs(output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._request.return_token_ids else UNSET,
        )
        self._add_prompt(choice, output)
        return choice

    def _add_prompt(self, choice: ChatChoice | ChatChunkChoice, output: RequestOutput) -> None:
        """Add what was asked for about the prompt; once per choice."""
        if self._request.return_token_ids:
            choice.prompt_token_ids = self._prompt.token_ids.tolist()
        if self._request.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
