"""The client against a real engine process that runs a fake engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hyradix.config import Settings
from hyradix.engine.client import EngineClient
from hyradix.engine.messages import RequestOutput
from hyradix.errors import ConfigError, EngineDeadError, HyradixError
from hyradix.request import FinishReason, Request, SamplingParams
from tests.support.fake_server import is_running, wait_until

Test = Callable[[EngineClient], Coroutine[Any, Any, None]]


def make_request(request_id: str, prompt: str = "hi", max_tokens: int = 5) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=b"".join(i.to_bytes(4, "little") for i in prompt.encode()),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        seed=0,
    )


@asynccontextmanager
async def started(factory: str) -> AsyncIterator[EngineClient]:
    client = EngineClient(
        Settings(model="fake"), factory=f"tests.support.fake_engine:{factory}", log_level="error"
    )
    await client.start()
    try:
        yield client
    finally:
        await client.stop()
        assert not is_running(client.pid)


def run(test: Test, *, factory: str = "build") -> None:
    async def body() -> None:
        async with started(factory) as client:
            await client.wait_ready()
            await test(client)

    asyncio.run(asyncio.wait_for(body(), 20))


async def read(client: EngineClient, *requests: Request) -> list[RequestOutput]:
    return [output async for output in client.generate(*requests)]


def test_outputs_arrive_in_order_and_end() -> None:
    async def test(client: EngineClient) -> None:
        outputs = await read(client, make_request("a", max_tokens=9))
        assert "".join(o.text for o in outputs) == "The quick"
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert client.num_open == 0
        assert client.info.model_dir == "/models/fake-dir"
        assert (await client.stats()).num_output_tokens == 9

    run(test)


def test_many_requests_share_a_stream() -> None:
    async def test(client: EngineClient) -> None:
        outputs = await read(client, *(make_request(str(i)) for i in range(20)))
        assert sum(o.is_finished for o in outputs) == 20
        refused = await read(client, make_request("x", "REFUSE"), make_request("y"))
        assert {o.request_id: o.error_code for o in refused if o.is_finished} == {
            "x": "queue_full",
            "y": None,
        }

    run(test)


def test_progress_comes_before_ready() -> None:
    async def body() -> None:
        async with started("build") as client:
            seen: list[tuple[str, int, int]] = []
            await client.wait_ready(lambda *news: seen.append(news))
            assert seen[0] == ("weights", 0, 2)
            assert seen[-1] == ("weights", 2, 2)

    asyncio.run(body())


def test_bug_of_one_request_leaves_the_others() -> None:
    async def test(client: EngineClient) -> None:
        bad, good = await asyncio.gather(
            read(client, make_request("bad", "BUG")), read(client, make_request("good"))
        )
        assert bad[-1].finish_reason is FinishReason.ERROR
        assert good[-1].finish_reason is FinishReason.LENGTH
        assert client.is_alive

    run(test)


@pytest.mark.parametrize("how", ["close", "cancel", "abort"])
def test_leaving_a_stream_aborts(how: str) -> None:
    async def test(client: EngineClient) -> None:
        stream = client.generate(make_request("a", max_tokens=100_000))
        await anext(stream)
        if how == "close":
            stream.close()
        elif how == "abort":
            client.abort(["a", "unknown"])
        else:
            await _cancel_while_waiting(stream)
        assert client.num_open == 0
        stats = await client.stats()
        while stats.num_running:
            stats = await client.stats()
        assert (await read(client, make_request("b")))[-1].finish_reason is FinishReason.LENGTH
        assert (await client.stats()).finish_reasons == {"abort": 1, "length": 1}

    run(test, factory="build_slow")


async def _cancel_while_waiting(stream: Any) -> None:
    async def drain() -> None:
        async for _ in stream:
            pass

    task = asyncio.create_task(drain())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_cancel_all_ends_streams_with_the_error() -> None:
    async def test(client: EngineClient) -> None:
        stream = client.generate(make_request("a", max_tokens=100_000))
        client.cancel_all(EngineDeadError("stopping"))
        with pytest.raises(EngineDeadError, match="stopping"):
            async for _ in stream:
                pass

    run(test, factory="build_slow")


def test_kill_ends_every_stream_within_two_seconds() -> None:
    async def test(client: EngineClient) -> None:
        streams = [client.generate(make_request(str(i), max_tokens=100_000)) for i in range(5)]
        for stream in streams:
            await anext(stream)
        os.kill(client.pid, signal.SIGKILL)
        started_at = time.monotonic()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="signal 9"):
                async for _ in stream:
                    pass
        assert time.monotonic() - started_at < 2
        assert not client.is_alive
        assert isinstance(client.error, EngineDeadError)
        with pytest.raises(EngineDeadError):
            client.generate(make_request("later"))
        with pytest.raises(EngineDeadError):
            await client.stats()

    run(test, factory="build_slow")


def test_exception_out_of_step_ends_streams_with_its_message(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def test(client: EngineClient) -> None:
        other = client.generate(make_request("other", max_tokens=100_000))
        await anext(other)
        with pytest.raises(EngineDeadError, match="the step failed"):
            await read(client, make_request("a", "CRASH"))
        with pytest.raises(EngineDeadError, match="the step failed"):
            async for _ in other:
                pass
        await asyncio.sleep(0.5)
        assert not is_running(client.pid)

    run(test, factory="build_slow")
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("factory", "error", "text"),
    [
        ("build_refusing", ConfigError, "--states 1"),
        ("build_broken", EngineDeadError, "ZeroDivisionError"),
        ("no_such_function", EngineDeadError, "no_such_function"),
    ],
)
def test_failing_start_is_reported(factory: str, error: type[HyradixError], text: str) -> None:
    async def body() -> None:
        async with started(factory) as client:
            with pytest.raises(error, match=text):
                await client.wait_ready()

    asyncio.run(body())


@pytest.mark.slow
def test_stop_while_loading_is_quick() -> None:
    async def body() -> None:
        async with started("build_hanging"):
            await asyncio.sleep(0.5)
            started_at = time.monotonic()
        assert time.monotonic() - started_at < 2

    asyncio.run(body())


def test_stop_with_open_streams_ends_them() -> None:
    async def body() -> None:
        async with started("build_slow") as client:
            await client.wait_ready()
            stream = client.generate(make_request("a", max_tokens=100_000))
            await anext(stream)
        outputs = [output async for output in stream]
        assert outputs[-1].finish_reason is FinishReason.ABORT

    asyncio.run(body())


def test_socket_directory_is_private_and_removed() -> None:
    async def body() -> None:
        async with started("build") as client:
            directory = Path(client._directory)
            assert directory.stat().st_mode & 0o77 == 0
        assert not directory.exists()

    asyncio.run(body())


ORPHAN = """
import asyncio, os, signal
from hyradix.config import Settings
from hyradix.engine.client import EngineClient
async def main():
    client = EngineClient(Settings(model="fake"), factory="tests.support.fake_engine:build")
    await client.start()
    await client.wait_ready()
    print(client.pid, client._directory, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_engine_does_not_outlive_its_parent() -> None:
    result = subprocess.run(
        [sys.executable, "-c", ORPHAN],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    pid, directory = result.stdout.split()
    assert result.returncode == -signal.SIGKILL
    assert wait_until(lambda: not is_running(int(pid)), 2)
    assert not Path(directory).exists()
