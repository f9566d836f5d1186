"""The engine client without processes: a fake engine that steps on the caller's loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import httpx
from fastapi import FastAPI

from hyradix.config import Settings
from hyradix.engine.messages import CacheView, EngineInfo, EngineStats, RequestOutput
from hyradix.engine.streams import OutputStream
from hyradix.errors import BusyError, EngineDeadError, HyradixError
from hyradix.request import Request
from hyradix.server.app import create_app
from hyradix.server.frontend import ServerConfig
from tests.support.fake_engine import FakeEngine, build
from tests.support.fake_text import load_fake_text


class FakeClient:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.error: HyradixError | None = None
        self._streams: dict[str, OutputStream] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def is_alive(self) -> bool:
        return self.error is None

    def generate(self, *requests: Request) -> OutputStream:
        if self.error is not None:
            raise EngineDeadError(self.error.message)
        stream = OutputStream([r.request_id for r in requests], on_close=self._abort)
        for request in requests:
            self._streams[request.request_id] = stream
            refusal = self.engine.add(request)
            if refusal is not None:
                self._push(refusal)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())
        return stream

    async def stats(self) -> EngineStats:
        if self.error is not None:
            raise EngineDeadError(self.error.message)
        return self.engine.stats()

    async def cache_view(self) -> CacheView:
        return self.engine.cache_view()

    async def flush_cache(self) -> None:
        if not self.engine.flush_cache():
            raise BusyError("busy")

    def die(self, message: str) -> None:
        self.error = EngineDeadError(message)
        for stream in self._streams.values():
            stream.fail(self.error)
        self._streams.clear()
        self.engine.running.clear()

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)
            self.engine.abort(request_id)

    async def _run(self) -> None:
        while self.engine.has_work():
            for output in self.engine.step():
                self._push(output)
            await asyncio.sleep(0)

    def _push(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is not None:
            stream.push(output)


class Api:
    """The application over ASGI, with synchronous calls."""

    def __init__(self, *, settings: Settings | None = None, **config: Any) -> None:
        settings = settings or Settings(model="fake", max_context=8192)
        self.engine = build(settings, lambda *_: None)
        self.client = FakeClient(self.engine)
        tokenizer, template = load_fake_text(None)  # type: ignore[arg-type]
        options: dict[str, Any] = {
            "served_model_name": "fake",
            "model_aliases": frozenset({"fake-dir"}),
        }
        self.app: FastAPI = create_app(
            self.client,
            tokenizer,
            template,
            ServerConfig(**(options | config)),
            draw_seed=lambda: 0,
            wall_clock=lambda: 1000.5,
        )

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **arguments)

        return asyncio.run(send())

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return self.request("GET", path, **arguments)

    def post(self, path: str, body: Any = None, **arguments: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **arguments)

    def complete(self, prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, content: str = "hello", **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/chat/completions", chat_body(content, **fields))
        assert response.status_code == 200, response.text
        return response.json()


def chat_body(content: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def events_of(response: httpx.Response) -> list[Any]:
    """The events of a stream, decoded; ``[DONE]`` must be the last and is left out."""
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    """The lists of all chunks as one."""
    return [item for part in parts for item in part]
