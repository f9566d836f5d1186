"""Chat in a terminal, against a server or an engine in this process.

Owns: the conversation and how it looks. Does not know: how replies come about (a backend does).
Invariant: a reply that is cut short with Ctrl-C is aborted where it runs, and stays in the
conversation as far as it came.
Read next: ``cli.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import httpx
import msgspec

from hyradix.engine.messages import RequestOutput
from hyradix.engine.results import raise_error
from hyradix.errors import EngineDeadError, HyradixError
from hyradix.request import SamplingParams

Message = dict[str, Any]
TIMEOUT = httpx.Timeout(10.0, read=None)


@dataclass(slots=True)
class ReplyCounts:
    """Tokens of the latest reply."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    miss_reason: str = ""

    def __str__(self) -> str:
        reason = f" ({self.miss_reason})" if self.miss_reason not in ("", "none") else ""
        return (
            f"[{self.prompt} prompt tokens, {self.cached} of them cached{reason}; "
            f"{self.output} generated]"
        )


class Backend(Protocol):
    """Where replies come from."""

    counts: ReplyCounts

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        """Text as it comes; closing the generator aborts. Raises ``HyradixError``."""
        ...


class StreamingLLM(Protocol):
    """``hyradix.LLM`` as the terminal uses it."""

    def stream(self, prompt: str, sampling_params: SamplingParams) -> Iterator[RequestOutput]: ...
    def stream_chat(
        self, messages: list[Message], sampling_params: SamplingParams
    ) -> Iterator[RequestOutput]: ...


class OfflineBackend:
    """Replies from an engine in this process."""

    def __init__(self, llm: StreamingLLM, sampling: SamplingParams) -> None:
        self.counts = ReplyCounts()
        self._llm = llm
        self._sampling = sampling

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        """See ``Backend``."""
        chat = msgspec.structs.replace(self._sampling)
        return self._texts(self._llm.stream_chat(messages, chat))

    def continue_text(self, prompt: str) -> Generator[str, None, None]:
        """Continue a prompt without a template."""
        return self._texts(self._llm.stream(prompt, self._sampling))

    def _texts(self, outputs: Iterator[RequestOutput]) -> Generator[str, None, None]:
        try:
            for output in outputs:
                raise_error(output)
                self.counts = ReplyCounts(
                    output.num_prompt_tokens,
                    output.num_cached_tokens,
                    output.num_output_tokens,
                    output.miss_reason,
                )
                yield output.text
        finally:
            if isinstance(outputs, Generator):
                outputs.close()


class HttpBackend:
    """Replies from a running server, over its OpenAI API."""

    def __init__(
        self,
        url: str,
        sampling: SamplingParams,
        *,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.counts = ReplyCounts()
        self._sampling = sampling
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        base = url.rstrip("/").removesuffix("/v1")
        if "://" not in base:
            base = f"http://{base}"
        self._client = httpx.Client(
            base_url=base, headers=headers, timeout=TIMEOUT, transport=transport
        )

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        """See ``Backend``. Closing the connection aborts the request."""
        body = {
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self._sampling.max_tokens,
            "temperature": self._sampling.temperature,
        }
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise HyradixError(_message_of(response.content))
                yield from self._texts(response.iter_lines())
        except httpx.HTTPError as error:
            raise EngineDeadError(f"{self._client.base_url}: {error}") from None

    def _texts(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            chunk = msgspec.json.decode(data)
            if "error" in chunk:
                raise HyradixError(chunk["error"]["message"])
            if chunk.get("usage"):
                self._count(chunk["usage"])
            for choice in chunk["choices"]:
                yield choice["delta"].get("content") or ""

    def _count(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        self.counts = ReplyCounts(
            usage["prompt_tokens"],
            details.get("cached_tokens", 0),
            usage["completion_tokens"],
            details.get("miss_reason", ""),
        )

    def close(self) -> None:
        """Close the connection pool."""
        self._client.close()


def _message_of(content: bytes) -> str:
    try:
        return str(msgspec.json.decode(content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return content.decode(errors="replace")[:500] or "the server sent an error without text"


def print_stream(texts: Generator[str, None, None], out: TextIO) -> str:
    """Write text as it comes and return it; Ctrl-C aborts the rest."""
    parts: list[str] = []
    with closing(texts):
        try:
            for text in texts:
                parts.append(text)
                out.write(text)
                out.flush()
        except KeyboardInterrupt:
            out.write(" [cut]")
    return "".join(parts)


def chat_loop(
    backend: Backend,
    *,
    system: str | None,
    is_verbose: bool,
    read_line: Callable[[str], str],
    out: TextIO,
) -> None:
    """Read lines and answer them until the input ends (Ctrl-D).

    ``read_line`` is ``input`` or behaves like it.
    """
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    while (text := _next_line(read_line, out)) is not None:
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            reply = print_stream(backend.reply(messages), out)
        except HyradixError as error:
            out.write(f"error: {error.message}\n")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": reply})
        out.write(f"\n{backend.counts}\n" if is_verbose else "\n")
    out.write("\n")


def _next_line(read_line: Callable[[str], str], out: TextIO) -> str | None:
    """A line without blanks around it; "" after Ctrl-C; None at the end of the input."""
    try:
        return read_line("> ").strip()
    except KeyboardInterrupt:
        out.write("\n")
        return ""
    except EOFError:
        return None
