from __future__ import annotations

from typing import Any

import pytest

from hyradix.request import Boundary, BoundaryKind
from tests.support.fake_client import Api, chat_body, events_of, joined
from tests.support.fake_engine import NATURAL_END, SENTENCE

WORDS = SENTENCE.decode()


@pytest.fixture
def api() -> Api:
    return Api()


def test_chat_has_openai_shape(api: Api) -> None:
    reply = api.chat(max_tokens=9)
    assert reply["object"] == "chat.completion"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": WORDS[:9], "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    prompt = "user: hello\nassistant: "
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    request = api.engine.requests[0]
    assert bytes(request.prompt_array().astype("u1")) == prompt.encode()
    assert request.boundaries == (Boundary(12, BoundaryKind.LAST),)


def test_default_is_up_to_the_context(api: Api) -> None:
    assert api.chat()["usage"]["completion_tokens"] == NATURAL_END + 1
    assert api.engine.requests[0].sampling.max_tokens is None


def test_max_completion_tokens_wins(api: Api) -> None:
    assert api.chat(max_completion_tokens=3, max_tokens=8)["usage"]["completion_tokens"] == 3


def test_template_options(api: Api) -> None:
    api.chat(
        add_generation_prompt=False,
        chat_template_kwargs={"mood": "good"},
        tools=[{"type": "function", "function": {"name": "f"}}],
        max_tokens=1,
    )
    api.chat(tools=[{"type": "function"}], tool_choice="none", max_tokens=1)
    prompts = [bytes(r.prompt_array().astype("u1")).decode() for r in api.engine.requests]
    assert prompts == [
        "tools: 1\nmood=good\nuser: hello\n",
        "user: hello\nassistant: ",
    ]


def test_harmless_fields_are_ignored(api: Api) -> None:
    api.chat(
        user="x",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        parallel_tool_calls=False,
        reasoning_effort="low",
        response_format={"type": "text"},
        tool_choice="auto",
        max_tokens=1,
    )


def test_logprobs(api: Api) -> None:
    choice = api.chat("UNICODE", max_tokens=2, logprobs=True, top_logprobs=1)["choices"][0]
    first = choice["logprobs"]["content"][0]
    assert first == {
        "token": "Ã",
        "logprob": -0.5,
        "bytes": [0xC3, 0x83],
        "top_logprobs": [{"token": "Ã", "logprob": -0.5, "bytes": [0xC3, 0x83]}],
    }
    content = api.chat(max_tokens=2, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], []]


def test_stream_adds_up_to_the_whole(api: Api) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 12,
        "n": 2,
        "seed": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    whole = api.chat("hi", **fields)
    body = chat_body("hi", **fields, stream=True, stream_options={"include_usage": True})
    *chunks, last = events_of(api.post("/v1/chat/completions", body))
    assert last["usage"]["completion_tokens"] == 24
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert not any("prompt_token_ids" in c for c in mine[1:])
        text = "".join(c["delta"].get("content", "") for c in mine)
        assert text == choice["message"]["content"]
        assert joined(c["token_ids"] for c in mine) == choice["token_ids"]
        entries = joined(c["logprobs"]["content"] for c in mine if c["logprobs"])
        assert entries == choice["logprobs"]["content"]
        reasons = [c["finish_reason"] for c in mine]
        assert reasons == [None] * (len(mine) - 1) + ["length"]


def test_request_that_fails_midway_ends_with_an_error_event(api: Api) -> None:
    body = chat_body("FAULT", stream=True)
    *chunks, last = events_of(api.post("/v1/chat/completions", body))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Th"
    assert last["error"]["message"] == "non-finite logits"
    assert last["error"]["code"] == "request_failed"


def test_failure_of_one_choice_ends_the_others(api: Api) -> None:
    response = api.post("/v1/completions", {"prompt": ["a" * 8, "FAULT"], "max_tokens": 4000})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "request_failed"
    assert len(api.engine.aborted) == 1
    assert not api.engine.running
