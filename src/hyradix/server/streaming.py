"""From a running generation to an HTTP response, whole or as server-sent events.

Owns: the event framing, and the watch for clients that leave: their requests are aborted at
once, not when the next token fails to be sent. Does not know: the shape of replies (a
``ReplyWriter`` does).
Invariants: nothing is sent before the first output, so that a refusal keeps its HTTP status; a
stream always ends with ``[DONE]``, after an error event if it failed.
Read next: ``completions.py``, ``chat.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hyradix.engine.messages import RequestOutput
from hyradix.errors import HyradixError
from hyradix.server.errors import CLIENT_CLOSED_REQUEST, JSON, encode_error
from hyradix.server.generation import Generation
from hyradix.server.replies import Usage

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ReplyWriter(Protocol):
    """Gives a reply its wire format."""

    def chunks(self, index: int, output: RequestOutput) -> list[bytes]:
        """The chunks (JSON) that tell what is new of a choice; may be none."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last chunk of a stream whose client asked for usage."""
        ...

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> bytes:
        """The whole reply; ``outputs`` has one merged output per choice."""
        ...


class ClientGoneError(Exception):
    """The client closed its connection before the response was complete."""


async def respond(
    request: Request,
    generation: Generation,
    writer: ReplyWriter,
    *,
    is_stream: bool,
    includes_usage: bool,
) -> Response:
    """Run the generation for a client. Aborts it if the client leaves. Raises ``HyradixError``."""
    try:
        if not is_stream:
            outputs = await unless_disconnected(request.receive, generation.collect())
            return Response(writer.whole(outputs, generation.usage()), media_type=JSON)
        first = await unless_disconnected(request.receive, anext_of(generation))
    except ClientGoneError:
        generation.close()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except BaseException:
        generation.close()
        raise
    return EventStream(generation, events(generation, first, writer, includes_usage))


async def anext_of(generation: Generation) -> tuple[int, RequestOutput]:
    """``anext`` as a coroutine (a task needs one)."""
    return await anext(generation)


async def events(
    generation: Generation,
    first: tuple[int, RequestOutput],
    writer: ReplyWriter,
    includes_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """The events of a stream, one ``bytes`` per engine output."""
    try:
        yield _frame(writer.chunks(*first))
        async for index, output in generation:
            yield _frame(writer.chunks(index, output))
        if includes_usage:
            yield _frame([writer.usage_chunk(generation.usage())])
    except HyradixError as error:
        yield _frame([encode_error(error)])
    yield DONE


def _frame(chunks: list[bytes]) -> bytes:
    return b"".join(b"data: %b\n\n" % chunk for chunk in chunks)


class EventStream(Response):
    """Sends events until they end or the client leaves; then closes the generation."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, body: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ClientGoneError:
            pass
        finally:
            self._generation.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._body) as body:
            async for data in body:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, or cancel it and raise ``ClientGoneError`` when the client leaves.

    The request's body must have been read: whatever is received now is the end of the connection.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
