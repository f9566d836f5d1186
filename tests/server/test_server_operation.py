"""Models, tokens, health and metrics."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.fake_client import Api


@pytest.fixture
def api() -> Api:
    return Api()


def test_models(api: Api) -> None:
    card = api.get("/v1/models").json()["data"][0]
    assert card["id"] == "fake"
    assert card["object"] == "model"
    assert card["max_model_len"] == 8192
    assert api.get("/v1/models/fake").json() == card


def test_tokenize_and_back(api: Api) -> None:
    reply = api.post("/tokenize", {"prompt": "hé"}).json()
    assert reply == {"tokens": list("hé".encode()), "count": 3, "max_model_len": 8192}
    assert api.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": "hé"}
    messages = [{"role": "user", "content": "a"}]
    reply = api.post("/tokenize", {"messages": messages}).json()
    assert bytes(reply["tokens"]) == b"user: a\nassistant: "
    reply = api.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert bytes(reply["tokens"]) == b"user: a\n"
    assert api.post("/tokenize", {"prompt": ""}).json()["count"] == 0


def test_tokenize_refuses(api: Api) -> None:
    for body in ({}, {"prompt": "a", "messages": []}, {"messages": []}):
        assert api.post("/tokenize", body).status_code == 400
    for tokens in ([-1], [257], ["a"], None):
        assert api.post("/detokenize", {"tokens": tokens}).status_code == 400


def test_health_follows_the_engine(api: Api) -> None:
    assert api.get("/health").json() == {"status": "ok"}
    api.client.die("the engine process ended by signal 9")
    response = api.get("/health")
    assert response.status_code == 503
    assert "signal 9" in response.json()["error"]["message"]
    assert api.post("/v1/completions", {"prompt": "a"}).status_code == 503


def test_metrics(api: Api) -> None:
    api.complete("hello", max_tokens=3)
    api.get("/nothing/that/a/client/chose")
    text = api.get("/metrics").text
    for line in (
        "hyradix_engine_up 1.0",
        'hyradix_kv_slots{owner="cached"} 10.0',
        'hyradix_state_slots{owner="free"} 90.0',
        "hyradix_output_tokens_total 3.0",
        'hyradix_cache_misses_total{reason="cold"} 1.0',
        'hyradix_requests_finished_total{reason="length"} 1.0',
        'hyradix_http_requests_total{method="POST",path="/v1/completions",status="200"} 1.0',
        'hyradix_http_requests_total{method="GET",path="other",status="404"} 1.0',
        "hyradix_time_to_first_token_seconds_count 1.0",
        "hyradix_inter_token_latency_seconds_count 2.0",
        "hyradix_request_seconds_count 1.0",
    ):
        assert line in text.splitlines()
    assert "chose" not in text


def test_metrics_of_a_dead_engine_keep_the_last_counters(api: Api) -> None:
    api.complete("hello", max_tokens=3)
    api.get("/metrics")
    api.client.die("gone")
    lines = api.get("/metrics").text.splitlines()
    assert "hyradix_engine_up 0.0" in lines
    assert "hyradix_output_tokens_total 3.0" in lines


def test_server_process_does_not_load_torch() -> None:
    code = (
        "import sys, hyradix.server.launch, hyradix.engine.process, hyradix.server.terminal; "
        "assert not {'torch', 'numba', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_the_cache_is_shown(api: Api) -> None:
    view = api.get("/v1/cache").json()
    assert view["pools"]["kv"] == {"free": 90, "cached": 10, "held": 0, "total": 100}
    namespace = view["namespaces"][0]
    assert namespace["id"] == ["", "salt"]
    assert namespace["nodes"][0]["has_state"] is True
    assert set(namespace["nodes"][0]) == {
        "id",
        "parent",
        "depth",
        "num_tokens",
        "has_state",
        "kv_lock",
        "state_lock",
        "last_use",
    }


def test_the_cache_is_flushed_only_when_idle(api: Api) -> None:
    assert api.post("/flush_cache", {}).json() == {"status": "ok"}
    api.client.engine.flush_cache = lambda: False
    response = api.post("/flush_cache", {})
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "busy"
