"""POST /v1/completions.

Owns: what a prompt may be, echo, and the shape of completions. Does not know: the engine.
Read next: ``frontend.py``, ``logprobs.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from msgspec import UNSET

from hyradix.engine.messages import RequestOutput, TokenLogprob
from hyradix.errors import InvalidParameterError
from hyradix.request import Int32Array, SamplingParams
from hyradix.server.frontend import Frontend, Prompt
from hyradix.server.generation import Generation
from hyradix.server.logprobs import completion_logprobs, prompt_logprobs
from hyradix.server.protocol import CompletionRequest, check_completion, sampling_of
from hyradix.server.replies import Completion, CompletionChoice, CompletionLogprobs, Usage, encode

DEFAULT_MAX_TOKENS = 16


async def start_completion(
    frontend: Frontend, request: CompletionRequest, *, created: int
) -> tuple[Generation, CompletionWriter]:
    """Check, tokenise and submit. Raises ``HyradixError``."""
    frontend.check_model(request.model)
    check_completion(request)
    sampling = _sampling(frontend, request)
    prompts = await _prompts(frontend, request)
    generation = frontend.start(
        prompts,
        sampling,
        id_prefix="cmpl",
        salt=request.cache_salt,
        drops_tokens=request.max_tokens == 0,
    )
    writer = CompletionWriter(
        frontend, request, generation.reply_id, prompts, sampling.n, created=created
    )
    return generation, writer


def _sampling(frontend: Frontend, request: CompletionRequest) -> SamplingParams:
    """With echo, logprobs are wanted of the prompt too. ``max_tokens`` 0 runs one token."""
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    of_prompt = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        of_prompt = max(of_prompt or 0, request.logprobs)
    return sampling_of(
        request,
        max_tokens=max_tokens or 1,
        logprobs=request.logprobs,
        prompt_logprobs=of_prompt,
        vocab_size=frontend.info.vocab_size,
        max_context=frontend.info.max_context,
    )


async def _prompts(frontend: Frontend, request: CompletionRequest) -> list[Prompt]:
    """A text, texts, token ids, or lists of token ids."""
    prompt = request.prompt
    special = True if request.add_special_tokens is None else request.add_special_tokens
    if isinstance(prompt, str):
        return [await frontend.prompt_of_text(prompt, add_special_tokens=special)]
    if not prompt:
        raise InvalidParameterError("prompt must not be empty", param="prompt")
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise InvalidParameterError(
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists "
            "of token ids, not a mixture",
            param="prompt",
        )
    if kinds == {int}:
        return [frontend.prompt_of_ids(cast(list[int], prompt))]
    if kinds == {str}:
        texts = cast(list[str], prompt)
        return [await frontend.prompt_of_text(t, add_special_tokens=special) for t in texts]
    return [frontend.prompt_of_ids(ids) for ids in cast(list[list[int]], prompt)]


class CompletionWriter:
    """Gives completions their wire format. Keeps, per choice, how far its text has come."""

    def __init__(
        self,
        frontend: Frontend,
        request: CompletionRequest,
        reply_id: str,
        prompts: Sequence[Prompt],
        n: int,
        *,
        created: int,
    ) -> None:
        self._frontend = frontend
        self._request = request
        self._reply_id = reply_id
        self._prompts = prompts
        self._n = n
        self._created = created
        self._model = frontend.config.served_model_name
        self._offsets: dict[int, int] = {}

    def chunks(self, index: int, output: RequestOutput) -> list[bytes]:
        """See ``ReplyWriter``."""
        is_first = index not in self._offsets
        choice = self._choice(index, output)
        has_news = choice.text or output.is_finished or output.logprobs or is_first
        if not has_news and not (output.token_ids and self._request.return_token_ids):
            return []
        reply = self._reply([choice])
        if self._request.includes_usage:
            reply.usage = None
        return [encode(reply)]

    def usage_chunk(self, usage: Usage) -> bytes:
        """See ``ReplyWriter``."""
        reply = self._reply([])
        reply.usage = usage
        return encode(reply)

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> bytes:
        """See ``ReplyWriter``."""
        reply = self._reply([self._choice(i, output) for i, output in enumerate(outputs)])
        reply.usage = usage
        return encode(reply)

    def _reply(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self._reply_id, created=self._created, model=self._model, choices=choices
        )

    def _choice(self, index: int, output: RequestOutput) -> CompletionChoice:
        request, prompt = self._request, self._prompts[index // self._n]
        is_first = index not in self._offsets
        choice = CompletionChoice(
            index=index,
            text=output.text,
            logprobs=self._logprobs(index, output, prompt),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        if is_first and request.echo:
            choice.text = self._text_of(prompt) + output.text
        if request.return_token_ids:
            choice.token_ids = output.token_ids
            choice.prompt_token_ids = prompt.token_ids.tolist() if is_first else UNSET
        if request.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return choice

    def _logprobs(
        self, index: int, output: RequestOutput, prompt: Prompt
    ) -> CompletionLogprobs | None:
        """The logprobs of this output's tokens; with echo, the prompt's come first."""
        offset = self._offsets.setdefault(index, 0)
        if self._request.logprobs is None:
            return None
        entries: list[TokenLogprob | None] = [*(output.logprobs or ())]
        first_text = ""
        if self._request.echo and output.prompt_logprobs is not None:
            entries = [*output.prompt_logprobs, *entries]
            first_text = self._frontend.tokenizer.decode(
                prompt.token_ids[:1], skip_special_tokens=False
            )
        logprobs = completion_logprobs(entries, offset=offset, first_text=first_text)
        self._offsets[index] = offset + sum(map(len, logprobs.tokens))
        return logprobs

    def _text_of(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._decode(prompt.token_ids)

    def _decode(self, token_ids: Int32Array) -> str:
        return self._frontend.tokenizer.decode(token_ids, skip_special_tokens=False)
