from __future__ import annotations

import io
import json
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import pytest

from hyradix.engine.messages import RequestOutput
from hyradix.errors import EngineDeadError, HyradixError
from hyradix.request import FinishReason, MissReason, SamplingParams
from hyradix.server.terminal import HttpBackend, OfflineBackend, chat_loop, print_stream
from tests.support.fake_client import Api

SAMPLING = SamplingParams(max_tokens=9, temperature=0.0)


class FakeLLM:
    """Repeats the last message, word by word."""

    def __init__(self) -> None:
        self.was_closed = False
        self.asked: list[list[dict[str, Any]]] = []

    def stream(self, prompt: str, sampling_params: SamplingParams) -> Iterator[RequestOutput]:
        try:
            for word in prompt.split():
                yield RequestOutput(request_id="a", text=f"{word} ")
                if word == "interrupt":
                    raise KeyboardInterrupt
            yield RequestOutput(
                request_id="a",
                finish_reason=FinishReason.STOP,
                num_prompt_tokens=7,
                num_cached_tokens=3,
                num_output_tokens=2,
                miss_reason=MissReason.EVICTED,
            )
        finally:
            self.was_closed = True

    def stream_chat(
        self, messages: list[dict[str, Any]], sampling_params: SamplingParams
    ) -> Iterator[RequestOutput]:
        self.asked.append(list(messages))
        return self.stream(messages[-1]["content"], sampling_params)


def talk(backend: Any, text: str, **options: Any) -> str:
    out = io.StringIO()
    options = {"system": None, "is_verbose": False} | options
    lines = iter(text.splitlines())

    def read_line(prompt: str) -> str:
        out.write(prompt)
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    chat_loop(backend, read_line=read_line, out=out, **options)
    return out.getvalue()


def test_conversation_grows() -> None:
    llm = FakeLLM()
    text = talk(OfflineBackend(llm, SAMPLING), "one two\n\nthree\n", system="be nice")
    assert text == "> one two \n> > three \n> \n"
    assert [m["role"] for m in llm.asked[1]] == ["system", "user", "assistant", "user"]
    assert llm.asked[1][2]["content"] == "one two "


def test_verbose_shows_cached_tokens() -> None:
    text = talk(OfflineBackend(FakeLLM(), SAMPLING), "one\n", is_verbose=True)
    assert "[7 prompt tokens, 3 of them cached (evicted); 2 generated]" in text


def test_ctrl_c_cuts_the_reply_and_goes_on() -> None:
    llm = FakeLLM()
    text = talk(OfflineBackend(llm, SAMPLING), "please interrupt this\nmore\n")
    assert "please interrupt  [cut]" in text
    assert "more" in text
    assert llm.was_closed
    assert llm.asked[1][1]["content"] == "please interrupt "


def test_leaving_a_stream_closes_it() -> None:
    llm = FakeLLM()
    texts = OfflineBackend(llm, SAMPLING).continue_text("a b c")
    next(texts)
    texts.close()
    assert llm.was_closed


def test_continue_text_prints() -> None:
    out = io.StringIO()
    assert print_stream(OfflineBackend(FakeLLM(), SAMPLING).continue_text("a b"), out) == "a b "


def test_failed_reply_is_told_and_forgotten() -> None:
    class Failing(FakeLLM):
        def stream(self, prompt: str, sampling_params: SamplingParams) -> Iterator[RequestOutput]:
            yield RequestOutput(request_id="a", finish_reason=FinishReason.ERROR, error="no room")

    llm = Failing()
    assert "error: no room" in talk(OfflineBackend(llm, SAMPLING), "one\ntwo\n")
    assert len(llm.asked[1]) == 1


def http_backend(api: Api, **options: Any) -> HttpBackend:
    """A backend whose requests go to an application."""

    def handle(request: httpx.Request) -> httpx.Response:
        answer = api.request(
            request.method, request.url.path, content=request.read(), headers=request.headers
        )
        return httpx.Response(answer.status_code, content=answer.content)

    return HttpBackend("http://x/v1", SAMPLING, transport=httpx.MockTransport(handle), **options)


@pytest.fixture
def close_later() -> Generator[list[HttpBackend], None, None]:
    backends: list[HttpBackend] = []
    yield backends
    for backend in backends:
        backend.close()


def test_against_a_server(close_later: list[HttpBackend]) -> None:
    backend = http_backend(Api(api_key="k"), api_key="k")
    close_later.append(backend)
    text = talk(backend, "hello\nhello\n", is_verbose=True)
    assert "> The quick\n[23 prompt tokens, 0 of them cached (cold); 9 generated]" in text


def test_errors_of_a_server(close_later: list[HttpBackend]) -> None:
    close_later.append(http_backend(Api(api_key="k")))
    with pytest.raises(HyradixError, match="API key"):
        list(close_later[-1].reply([{"role": "user", "content": "a"}]))
    close_later.append(http_backend(Api()))
    with pytest.raises(HyradixError, match="non-finite"):
        list(close_later[-1].reply([{"role": "user", "content": "FAULT"}]))


def test_server_that_is_not_there(close_later: list[HttpBackend]) -> None:
    close_later.append(HttpBackend("http://127.0.0.1:9", SAMPLING))
    with pytest.raises(EngineDeadError, match=r"127\.0\.0\.1:9"):
        list(close_later[-1].reply([{"role": "user", "content": "a"}]))


def test_error_that_is_not_json(close_later: list[HttpBackend]) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(502, content=b"bad gateway"))
    close_later.append(HttpBackend("http://x", SAMPLING, transport=transport))
    with pytest.raises(HyradixError, match="bad gateway"):
        list(close_later[-1].reply([{"role": "user", "content": json.dumps("a")}]))
