"""What the engine says about one or more requests, as an asynchronous iterator.

Owns: the buffer between the receiving task and whoever reads. Does not know: sockets, processes.
Invariant: once read to its end, failed or closed, a stream never wakes anybody again.
Read next: ``client.py``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from hyradix.engine.messages import RequestOutput
from hyradix.errors import HyradixError


class OutputStream:
    """Outputs in order of arrival, until every request has had its last one.

    For one reader. Raises what ``fail`` was given, after the outputs that came before it.
    """

    def __init__(
        self, request_ids: Iterable[str], *, on_close: Callable[[list[str]], None]
    ) -> None:
        self._open_ids = set(request_ids)
        self._on_close = on_close
        self._buffer: deque[RequestOutput] = deque()
        self._error: HyradixError | None = None
        self._news = asyncio.Event()

    def push(self, output: RequestOutput) -> None:
        """Add an output and wake the reader."""
        if output.is_finished:
            self._open_ids.discard(output.request_id)
        self._buffer.append(output)
        self._news.set()

    def fail(self, error: HyradixError) -> None:
        """End the stream with an error."""
        self._open_ids.clear()
        self._error = error
        self._news.set()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. Being cancelled in here closes the stream."""
        while not self._buffer:
            if self._error is not None:
                # A new one each time: many streams share an error, a traceback belongs to one.
                raise type(self._error)(self._error.message)
            if not self._open_ids:
                raise StopAsyncIteration
            self._news.clear()
            try:
                await self._news.wait()
            except asyncio.CancelledError:
                self.close()
                raise
        return self._buffer.popleft()

    def close(self) -> None:
        """Abort what is unfinished; the stream then ends after what it holds."""
        if self._open_ids:
            unfinished = sorted(self._open_ids)
            self._open_ids.clear()
            self._on_close(unfinished)

    async def aclose(self) -> None:
        """Same as ``close``, so that ``contextlib.aclosing`` takes a stream."""
        self.close()
