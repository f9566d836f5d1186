"""Over a real socket: uvicorn, a real engine process with a fake engine, the real openai client."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.fake_client import chat_body
from tests.support.fake_engine import SENTENCE
from tests.support.fake_server import FakeServer, wait_until

WORDS = SENTENCE.decode()
LONG = {"max_tokens": 8000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer("build", max_body_mib=1) as server:
        yield server


@pytest.fixture(scope="module")
def slow_server() -> Iterator[FakeServer]:
    with FakeServer("build_slow") as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def metric(server: FakeServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(match[1]) if match else 0.0


def test_openai_client_chats(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hello"}]
    reply = client.chat.completions.create(model="fake", messages=messages, max_tokens=9, seed=0)  # type: ignore[call-overload]
    assert reply.choices[0].message.content == WORDS[:9]
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 9


def test_openai_client_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model="fake",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=9,
        seed=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == WORDS[:9]
    assert chunks[-1].usage.total_tokens > 9
    assert chunks[0].choices[0].prompt_token_ids == list(b"user: hello\nassistant: ")


def test_openai_client_completes(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="fake", prompt=["a", "b"], n=2, max_tokens=3, logprobs=1, echo=True, seed=0
    )
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert client.models.list().data[0].id == "fake"


def test_openai_client_sees_our_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="fake", prompt="a", temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_body_limit_over_a_socket(server: FakeServer) -> None:
    body = json.dumps({"prompt": "a" * (3 << 20)}).encode()
    pieces = (body[i : i + 65536] for i in range(0, len(body), 65536))
    for content in (body, pieces):
        response = httpx.post(f"{server.url}/v1/completions", content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "payload_too_large"
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_client_that_leaves_while_sending_is_no_bug() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
    with FakeServer() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head)
            time.sleep(0.1)
        assert httpx.get(f"{server.url}/health").status_code == 200
        code, errors, _ = server.stop()
    assert code == 0
    assert "Traceback" not in errors


def test_garbage_on_the_socket_does_not_hurt(server: FakeServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"\x16\x03\x01 no http\r\n\r\n")
        connection.recv(1000)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_overhead_of_a_long_prompt_is_small(server: FakeServer) -> None:
    """4,000 tokens to the first token, with an engine that needs no time."""
    with httpx.Client(base_url=server.url) as http:
        times = []
        for prompt in ("a" * 4000, [97] * 4000):
            for _ in range(10):
                started = time.perf_counter()
                http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
                times.append(time.perf_counter() - started)
    assert sorted(times)[len(times) // 4] < 0.02


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_client_that_leaves_aborts(slow_server: FakeServer, is_stream: bool, n: int) -> None:
    aborted = 'hyradix_requests_finished_total{reason="abort"}'
    before = metric(slow_server, aborted)
    body = json.dumps(chat_body("hello", stream=is_stream, n=n, **LONG)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", slow_server.port)) as connection:
        connection.sendall(head.encode() + body)
        assert wait_until(lambda: metric(slow_server, "hyradix_requests_running") == n)
        if is_stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    left_at = time.monotonic()
    assert wait_until(lambda: metric(slow_server, aborted) == before + n)
    assert time.monotonic() - left_at < 0.5
    assert metric(slow_server, "hyradix_requests_running") == 0


@pytest.mark.slow
def test_kill_of_the_engine_ends_streams_and_turns_health() -> None:
    with FakeServer("build_slow") as server:
        body = chat_body("hello", stream=True, **LONG)
        events = []
        with (
            httpx.Client(base_url=server.url, timeout=10) as http,
            http.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            os.kill(server.engine_pid, signal.SIGKILL)
            killed_at = time.monotonic()
            events = [line for line in lines if line]
        assert time.monotonic() - killed_at < 2
        assert events[-1] == "data: [DONE]"
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead"
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503
        assert "signal 9" in health.json()["error"]["message"]
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 503
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        code, _, seconds = server.stop()
        assert code == 0
        assert seconds < 5
