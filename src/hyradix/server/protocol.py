"""Requests on the wire: OpenAI's fields and ours, decoded and type-checked by msgspec.

Owns: names, types and the meaning of null (absent). Does not know: the model, the engine. Ranges
that ``SamplingParams.validate`` checks are not checked here.
Invariants: a wrong type is an ``InvalidParameterError`` that names the field; an unknown field is
refused unless it is known to be harmless (a typing error in a name must not pass silently).
Read next: ``replies.py`` (the other direction), ``frontend.py``.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, TypeVar

import msgspec

from hyradix.errors import InvalidParameterError, RequestError
from hyradix.request import MAX_LOGPROBS, SamplingParams

T = TypeVar("T")

MAX_SALT = 1024
"""Characters of a salt: the cache remembers it with each of many prefixes, also evicted ones."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; nothing is obfuscated."""


class GenerationFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions have in common. None means: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: int | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT)] | None = None
    """Prefixes are shared only between requests with the same salt."""
    return_token_ids: bool | None = None
    # Known and harmless: accepted without effect.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    priority: Any = None
    request_id: Any = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Known and harmless: accepted without effect.
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    prediction: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: one of ``prompt`` and ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode JSON. Raises ``RequestError`` (not JSON) or ``InvalidParameterError`` (wrong type)."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _describe(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None


def _describe(message: str, kind: type[Any]) -> InvalidParameterError:
    unknown = re.search(r"unknown field `([^`]*)`", message)
    if unknown is not None:
        name = unknown[1]
        known = [field.name for field in msgspec.structs.fields(kind)]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        return InvalidParameterError(f"unknown parameter '{name}'{hint}", param=name)
    path = re.search(r"`\$\.(\w+)", message)
    missing = re.search(r"missing required field `([^`]*)`", message)
    param = path[1] if path else missing[1] if missing else None
    return InvalidParameterError(f"{param}: {message}" if param else message, param=param)


def check_completion(request: CompletionRequest) -> None:
    """Refuse what is not supported, and combinations that mean nothing."""
    _check_stream_options(request)
    if request.suffix:
        raise InvalidParameterError("suffix is not supported", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidParameterError("best_of is supported only when equal to n", param="best_of")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidParameterError("max_tokens 0 needs echo", param="max_tokens")


def check_chat(request: ChatRequest) -> None:
    """Refuse what is not supported, and combinations that mean nothing."""
    _check_stream_options(request)
    form = request.response_format
    if form is not None and form.get("type") != "text":
        raise InvalidParameterError(
            f"response_format {form.get('type')!r} is not supported; only 'text' is",
            param="response_format",
        )
    if request.tool_choice not in (None, "none", "auto"):
        raise InvalidParameterError(
            "tool_choice must be 'none' or 'auto'; forcing a call is not supported",
            param="tool_choice",
        )
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise InvalidParameterError("top_logprobs needs logprobs: true", param="top_logprobs")
        if not 0 <= request.top_logprobs <= MAX_LOGPROBS:
            raise InvalidParameterError(
                f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {request.top_logprobs}",
                param="top_logprobs",
            )


def _check_stream_options(request: GenerationFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidParameterError("stream_options needs stream: true", param="stream_options")


_SAMPLING_NAMES = tuple(
    field.name
    for field in msgspec.structs.fields(SamplingParams)
    if field.name not in ("max_tokens", "logprobs", "prompt_logprobs")
)


def sampling_of(
    request: GenerationFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    vocab_size: int,
    max_context: int,
) -> SamplingParams:
    """The sampling parameters that were given, defaults for the rest; checked.

    Numbers beyond what the model has (``top_k``, ``max_tokens``) are cut to it, so that they fit
    the integers of the wire and of the data plane.
    """
    given = {name: getattr(request, name) for name in _SAMPLING_NAMES}
    sampling = SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **{name: value for name, value in given.items() if value is not None},
    )
    sampling.validate(vocab_size=vocab_size)
    return msgspec.structs.replace(
        sampling,
        top_k=min(sampling.top_k, vocab_size),
        min_tokens=min(sampling.min_tokens, max_context),
        max_tokens=None if max_tokens is None else min(max_tokens, max_context),
    )
