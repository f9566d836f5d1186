from __future__ import annotations

import asyncio

import pytest

from hyradix.engine.messages import RequestOutput
from hyradix.engine.streams import OutputStream
from hyradix.errors import EngineDeadError
from hyradix.request import FinishReason


def output(request_id: str, *, is_last: bool = False) -> RequestOutput:
    return RequestOutput(
        request_id=request_id, finish_reason=FinishReason.STOP if is_last else None
    )


async def read(stream: OutputStream) -> list[str]:
    return [news.request_id async for news in stream]


def test_ends_when_every_request_has() -> None:
    closed: list[list[str]] = []
    stream = OutputStream(["a", "b"], on_close=closed.append)
    for news in (output("a"), output("b", is_last=True), output("a", is_last=True)):
        stream.push(news)
    assert asyncio.run(read(stream)) == ["a", "b", "a"]
    stream.close()
    assert closed == []


def test_error_comes_after_what_was_there() -> None:
    async def body() -> None:
        stream = OutputStream(["a"], on_close=lambda _: None)
        stream.push(output("a"))
        error = EngineDeadError("dead")
        stream.fail(error)
        assert (await anext(stream)).request_id == "a"
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="dead") as raised:
                await anext(stream)
            assert raised.value is not error

    asyncio.run(body())


def test_close_names_what_is_unfinished_once() -> None:
    closed: list[list[str]] = []
    stream = OutputStream(["a", "b", "c"], on_close=closed.append)
    stream.push(output("b", is_last=True))
    stream.close()
    asyncio.run(stream.aclose())
    assert closed == [["a", "c"]]
    assert asyncio.run(read(stream)) == ["b"]


def test_reader_wakes_up() -> None:
    async def body() -> list[str]:
        stream = OutputStream(["a"], on_close=lambda _: None)
        reader = asyncio.create_task(read(stream))
        for is_last in (False, True):
            await asyncio.sleep(0.01)
            stream.push(output("a", is_last=is_last))
        return await reader

    assert asyncio.run(body()) == ["a", "a"]
