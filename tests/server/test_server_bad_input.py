"""Every wrong request gets an OpenAI-shaped error, before the engine is bothered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from hyradix.config import Settings
from tests.support.fake_client import Api, chat_body
from tests.support.fake_text import VOCAB_SIZE, FakeTokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def api() -> Api:
    return Api()


def check(response: httpx.Response, status: int, *, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
        assert param in error["message"] or "prompt" in error["message"]
    return error


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 0),
        ("n", 1000),
        ("n", "2"),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("min_tokens", 99),
        ("seed", 2**64),
        ("seed", 1.5),
        ("stop", ["a"] * 17),
        ("stop", ""),
        ("stop", 5),
        ("stop_token_ids", [VOCAB_SIZE]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"99999": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"word": 1}),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("best_of", 2),
        ("suffix", "end"),
        ("echo", 1),
        ("cache_salt", 5),
        ("cache_salt", "a" * 1025),
        ("max_token", 5),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", None),
        ("prompt", {"a": 1}),
        ("prompt", ["a", 1]),
        ("prompt", [[1], "a"]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", [-1]),
        ("prompt", [VOCAB_SIZE]),
        ("prompt", [2**31]),
        ("prompt", [2**80]),
        ("prompt", ["ok", ""]),
    ],
)
def test_completion_parameter(api: Api, param: str, value: Any) -> None:
    error = check(api.post(COMPLETIONS, {"prompt": "hi", param: value}), 400, param=param)
    assert error["type"] == "invalid_request_error"
    assert not api.engine.requests


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("messages", []),
        ("messages", None),
        ("messages", "hello"),
        ("messages", [5]),
        ("messages", [{"role": "user", "content": 5}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", "text"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}),
        ("tools", "f"),
        ("logprobs", 5),
        ("top_logprobs", 5),
        ("max_completion_tokens", "5"),
        ("functions", []),
    ],
)
def test_chat_parameter(api: Api, param: str, value: Any) -> None:
    check(api.post(CHAT, {**chat_body(), param: value}), 400, param=param)
    assert not api.engine.requests


def test_top_logprobs_range(api: Api) -> None:
    body = chat_body(logprobs=True, top_logprobs=21)
    check(api.post(CHAT, body), 400, param="top_logprobs")


def test_unknown_field_gets_a_hint(api: Api) -> None:
    error = check(api.post(COMPLETIONS, {"prompt": "a", "temprature": 1}), 400)
    assert "'temperature'" in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'{"prompt": "\xff"}',
        b"\xff\xfe",
        b'{"n": NaN}',
        b"[" * 9999,
    ],
)
def test_body_that_is_no_request(api: Api, path: str, body: bytes) -> None:
    check(api.request("POST", path, content=body), 400)


def test_unknown_model(api: Api) -> None:
    error = check(api.post(COMPLETIONS, {"prompt": "a", "model": "gpt-4"}), 404, param="model")
    assert error["code"] == "model_not_found"
    check(api.get("/v1/models/gpt-4"), 404)
    for name in ("fake", "fake-dir"):
        api.complete(model=name)


def test_prompt_that_is_too_long_says_limit_and_length() -> None:
    api = Api(settings=Settings(model="fake", max_context=100))
    for path, body in ((COMPLETIONS, {"prompt": "a" * 100}), (CHAT, chat_body("a" * 200))):
        error = check(api.post(path, body), 400)
        assert error["code"] == "context_length_exceeded"
        assert "100" in error["message"]
    assert not api.engine.requests
    api.complete("a" * 99, max_tokens=1)


def test_wrong_path_and_method(api: Api) -> None:
    assert check(api.get("/v1/nothing"), 404)["code"] == "not_found"
    response = api.get(CHAT)
    assert check(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_body_limit() -> None:
    api = Api(max_body_bytes=1000)
    body = b'{"prompt": "%s"}' % (b"a" * 2000)
    check(api.request("POST", COMPLETIONS, content=body), 413)

    async def chunked() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    check(api.request("POST", COMPLETIONS, content=chunked()), 413)
    api.complete("a" * 500)


def test_queue_limit_is_429() -> None:
    api = Api(settings=Settings(model="fake", max_queue=2))
    error = check(api.post(COMPLETIONS, {"prompt": "a", "n": 3}), 429)
    assert error["code"] == "queue_full"
    assert error["type"] == "rate_limit_error"
    for stream in (False, True):
        check(api.post(COMPLETIONS, {"prompt": "REFUSE", "stream": stream}), 429)


def test_too_many_choices(api: Api) -> None:
    check(api.post(COMPLETIONS, {"prompt": ["a"] * 200, "n": 100}), 400, param="n")


def test_huge_numbers_are_cut_to_what_there_is(api: Api) -> None:
    api.complete("a", top_k=2**70, max_tokens=2**70, min_tokens=2**69)
    sampling = api.engine.requests[0].sampling
    assert (sampling.top_k, sampling.max_tokens, sampling.min_tokens) == (VOCAB_SIZE, 8192, 8192)


def test_bug_is_500_with_the_same_shape(api: Api) -> None:
    assert check(api.post(COMPLETIONS, {"prompt": "BUG"}), 500)["code"] == "internal_error"


def test_api_key() -> None:
    api = Api(api_key="secret")
    body = {"prompt": "a"}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        error = check(api.post(COMPLETIONS, body, headers=headers), 401)
        assert error["code"] == "invalid_api_key"
    headers = {"Authorization": "Bearer secret"}
    assert api.post(COMPLETIONS, body, headers=headers).status_code == 200
    assert api.get("/health").status_code == 200
    assert api.get("/metrics").status_code == 200
    assert api.get("/v1/models").status_code == 401


def test_cors() -> None:
    origin = "http://page.test"
    api = Api(cors_origins=(origin,), api_key="secret")
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    response = api.request("OPTIONS", CHAT, headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin
    assert "access-control-allow-origin" not in Api().get("/health", headers=headers).headers


def test_hopelessly_long_texts_are_refused_before_they_are_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = Api()

    def never(self: object, text: str, *, add_special_tokens: bool = True) -> None:
        raise AssertionError("tokenized all the same")

    monkeypatch.setattr(FakeTokenizer, "encode", never)
    text = "a" * (4 * 8192)
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        response = api.post(path, body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "characters" in error["message"]
        assert "8192 tokens" in error["message"]
    assert api.post("/tokenize", {"prompt": "a" * ((1 << 22) + 1)}).status_code == 400
