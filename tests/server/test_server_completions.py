from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_client import Api, events_of, joined
from tests.support.fake_engine import SENTENCE
from tests.support.fake_text import EOS

WORDS = SENTENCE.decode()


@pytest.fixture
def api() -> Api:
    return Api()


def test_completion_has_openai_shape(api: Api) -> None:
    reply = api.complete("hello", max_tokens=9)
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["created"] == 1000
    assert reply["model"] == "fake"
    assert reply["choices"] == [
        {
            "index": 0,
            "text": WORDS[:9],
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0, "kv_tokens": 0, "miss_reason": "cold"},
    }


def test_default_is_16_tokens(api: Api) -> None:
    assert api.complete()["usage"]["completion_tokens"] == 16


def test_second_request_reports_cached_tokens(api: Api) -> None:
    api.complete("hello")
    details = api.complete("hello")["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 4, "kv_tokens": 4, "miss_reason": "none"}


def test_cache_salt_separates(api: Api) -> None:
    api.complete("hello", cache_salt="a")
    api.complete("hello", cache_salt="é" * 1024)
    assert api.complete("hello")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert api.engine.requests[0].namespace.salt == "a"


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ("hello", [5]),
        (["hello", "you"], [5, 3]),
        ([104, 105], [2]),
        ([[104, 105], [106]], [2, 1]),
    ],
)
def test_every_form_of_prompt(api: Api, prompt: Any, lengths: list[int]) -> None:
    reply = api.complete(prompt, max_tokens=2)
    assert [r.num_prompt_tokens for r in api.engine.requests] == lengths
    assert [c["index"] for c in reply["choices"]] == list(range(len(lengths)))
    assert reply["usage"]["prompt_tokens"] == sum(lengths)


def test_n_fans_out_with_derived_seeds(api: Api) -> None:
    reply = api.complete(["a", "b"], n=3, seed=7, max_tokens=4, best_of=3)
    assert [c["index"] for c in reply["choices"]] == list(range(6))
    seeds = [r.seed for r in api.engine.requests]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert seeds[:3] == seeds[3:]
    assert all(r.sampling.n == 1 for r in api.engine.requests)
    assert reply["usage"]["prompt_tokens"] == 2
    assert reply["usage"]["completion_tokens"] == 24
    texts = [c["text"] for c in reply["choices"]]
    assert texts[0] == texts[3] == WORDS[7:11]
    assert len(set(texts)) == 3


def test_stop_string_and_token(api: Api) -> None:
    choice = api.complete(max_tokens=99, stop=[" quick"])["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == " quick"
    choice = api.complete(max_tokens=99, stop_token_ids=[ord("q")])["choices"][0]
    assert choice["stop_reason"] == ord("q")


def test_end_of_sequence_counts_as_a_token(api: Api) -> None:
    reply = api.complete(max_tokens=999, return_token_ids=True)
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert choice["token_ids"][-1] == EOS
    assert choice["prompt_token_ids"] == list(b"hello")
    assert (
        reply["usage"]["completion_tokens"] == len(choice["token_ids"]) == len(choice["text"]) + 1
    )


def test_all_sampling_fields_arrive(api: Api) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "seed": 3,
        "max_tokens": 5,
        "logit_bias": {"5": 1.5},
    }
    api.complete(**fields, user="someone", metadata={"a": 1})
    sampling = api.engine.requests[0].sampling
    for name, value in fields.items():
        assert getattr(sampling, name) == ({5: 1.5} if name == "logit_bias" else value)


def test_null_means_default(api: Api) -> None:
    api.complete(temperature=None, stop=None, n=None, stream=None, max_tokens=None)
    assert api.engine.requests[0].sampling.temperature == 1.0


def test_logprobs(api: Api) -> None:
    logprobs = api.complete(max_tokens=3, logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["T", "h", "e"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][0] == {"T": -0.5, "U": -1.5}
    assert logprobs["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_as_evaluation_harnesses_ask(api: Api, max_tokens: int) -> None:
    reply = api.complete("abc", max_tokens=max_tokens, logprobs=1, echo=True)
    choice = reply["choices"][0]
    assert choice["text"] == "abc" + "T" * max_tokens
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "T"][: 3 + max_tokens]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5][: 3 + max_tokens]
    assert logprobs["top_logprobs"][:2] == [None, {"b": -0.5}]
    assert logprobs["text_offset"] == [0, 1, 2, 3][: 3 + max_tokens]
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == max_tokens


def test_echo_of_token_ids(api: Api) -> None:
    assert api.complete(list(b"abc"), max_tokens=1, echo=True)["choices"][0]["text"] == "abcT"


def test_prompt_logprobs(api: Api) -> None:
    choice = api.complete("ab", max_tokens=1, prompt_logprobs=1)["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}},
    ]


def test_stream_adds_up_to_the_whole(api: Api) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "n": 2, "seed": 4, "logprobs": 1, "echo": True}
    whole = api.complete("hi", **fields, return_token_ids=True)
    response = api.post(
        "/v1/completions",
        {
            "prompt": "hi",
            **fields,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    *chunks, last = events_of(response)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 24
    assert all(chunk["usage"] is None for chunk in chunks)
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert joined(c["token_ids"] for c in mine) == choice["token_ids"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert joined(c["logprobs"][name] for c in mine) == choice["logprobs"][name]
        assert [c["finish_reason"] for c in mine][-1] == "length"
        assert [c for c in mine if "prompt_token_ids" in c] == mine[:1]


def test_stream_without_usage_has_none(api: Api) -> None:
    response = api.post("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 2})
    assert all("usage" not in event for event in events_of(response))


def test_characters_of_several_bytes_arrive_whole(api: Api) -> None:
    body = {"prompt": "UNICODE", "stream": True, "max_tokens": 9}
    events = events_of(api.post("/v1/completions", body))
    assert [e["choices"][0]["text"] for e in events if e["choices"][0]["text"]] == list("äöü€")
