"""Start and end of the two processes."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time

import httpx
import pytest

from tests.support.fake_client import chat_body
from tests.support.fake_server import FakeServer, is_running, wait_until


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_server_stops_at_once(number: int) -> None:
    with FakeServer() as server:
        engine = server.engine_pid
        with httpx.Client(base_url=server.url) as http:
            assert http.get("/health").status_code == 200  # leaves an idle connection open
            code, errors, seconds = server.stop(number)
    assert code == 0, errors
    assert seconds < 3
    assert "Traceback" not in errors
    assert not is_running(engine)


@pytest.mark.slow
def test_running_request_is_finished() -> None:
    with FakeServer("build_slow") as server:
        replies = []

        def ask() -> None:
            body = chat_body("hello", max_tokens=40)
            replies.append(httpx.post(f"{server.url}/v1/chat/completions", json=body))

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.3)
        code, errors, _ = server.stop()
        thread.join()
    assert code == 0
    assert "Traceback" not in errors
    assert replies[0].json()["usage"]["completion_tokens"] == 40


@pytest.mark.slow
def test_long_request_is_cancelled_with_an_error_event() -> None:
    with FakeServer("build_slow") as server:
        body = chat_body("hello", stream=True, max_tokens=8000, ignore_eos=True)
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            stopped_at = time.monotonic()
            events = [line for line in lines if line]
        code, errors, _ = server.wait()
        assert time.monotonic() - stopped_at < 8
    assert code == 0
    assert "Traceback" not in errors
    assert events[-1] == "data: [DONE]"
    assert "shutting down" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]


@pytest.mark.slow
def test_second_ctrl_c_kills() -> None:
    with FakeServer("build_slow") as server:
        engine = server.engine_pid
        body = chat_body("hello", stream=True, max_tokens=8000, ignore_eos=True)
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()  # kept: the response closes with its iterator
            next(lines)
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            code, _, seconds = server.stop(signal.SIGINT)
    assert code == 130
    assert seconds < 1
    assert wait_until(lambda: not is_running(engine), 1)


def test_busy_port_is_told_before_loading() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, errors, seconds = FakeServer("build_hanging", port=port).wait()
    assert code == 2
    assert seconds < 5
    assert errors.strip() == (
        f"hyradix: error: port {port} on 127.0.0.1 is in use; choose another one with --port"
    )


@pytest.mark.parametrize(
    ("factory", "options", "code", "text"),
    [
        ("build_refusing", {}, 2, "--states 1 is less than --max-requests 2"),
        ("build", {"host": "no.such.host.invalid"}, 2, "no.such.host.invalid"),
        ("build", {"log_level": "loud"}, 2, "--log-level"),
    ],
)
def test_wrong_options_are_one_line(
    factory: str, options: dict[str, str], code: int, text: str
) -> None:
    returned, errors, _ = FakeServer(factory, **options).wait()
    assert returned == code
    assert text in errors
    assert len(errors.strip().splitlines()) == 1, errors


def test_bug_at_start_up_shows_its_traceback() -> None:
    code, errors, _ = FakeServer("build_broken").wait()
    assert code == 1
    assert "Traceback" in errors
    assert errors.strip().splitlines()[-1].startswith("hyradix: error: the engine failed")


@pytest.mark.slow
def test_signal_while_loading() -> None:
    server = FakeServer("build_hanging")
    assert wait_until(lambda: _has_engine(server))
    time.sleep(0.3)
    engine = server.engine_pid
    code, errors, seconds = server.stop()
    assert code == 0, errors
    assert seconds < 3
    assert not is_running(engine)


def _has_engine(server: FakeServer) -> bool:
    try:
        return bool(server.engine_pid)
    except (ValueError, OSError):
        return False
