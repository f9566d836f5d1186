"""The HTTP application: routes, middleware, and nothing else.

Owns: which path is served by what. Does not know: processes, sockets.
Read next: ``completions.py``, ``chat.py``, ``launch.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from hyradix.errors import BusyError, EngineDeadError, InvalidParameterError
from hyradix.server.chat import start_chat
from hyradix.server.completions import start_completion
from hyradix.server.errors import JSON, install_handlers
from hyradix.server.frontend import ChatTemplate, Client, Frontend, ServerConfig, Tokenizer
from hyradix.server.metrics import CONTENT_TYPE, ServerMetrics
from hyradix.server.middleware import ApiKeyMiddleware, CountingMiddleware, read_body
from hyradix.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decode_body,
)
from hyradix.server.replies import Detokenized, ModelCard, ModelList, Tokenized, encode
from hyradix.server.streaming import respond

T = TypeVar("T")


def create_app(
    client: Client,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    config: ServerConfig,
    *,
    draw_seed: Callable[[], int],
    wall_clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The application that serves ``client``'s model.

    ``draw_seed`` is called for each request that brings no seed.
    """
    metrics = ServerMetrics()
    frontend = Frontend(client, tokenizer, template, config, metrics, draw_seed=draw_seed)
    app = FastAPI(title="Hyradix", openapi_url=None, redirect_slashes=False)
    install_handlers(app)
    # Added first is innermost: CORS answers preflights before the key is asked for, and
    # everything is counted.
    if config.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=config.api_key)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    app.add_middleware(CountingMiddleware, metrics=metrics)
    _add_generation(app, frontend, wall_clock)
    _add_models(app, frontend, wall_clock)
    _add_text(app, frontend)
    _add_operation(app, frontend)
    return app


async def _read(request: Request, frontend: Frontend, kind: type[T]) -> T:
    return decode_body(await read_body(request, frontend.config.max_body_bytes), kind)


def _json(reply: msgspec.Struct) -> Response:
    return Response(encode(reply), media_type=JSON)


def _add_generation(app: FastAPI, frontend: Frontend, wall_clock: Callable[[], float]) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _read(request, frontend, CompletionRequest)
        generation, writer = await start_completion(frontend, body, created=int(wall_clock()))
        return await respond(
            request,
            generation,
            writer,
            is_stream=bool(body.stream),
            includes_usage=body.includes_usage,
        )

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await _read(request, frontend, ChatRequest)
        generation, writer = await start_chat(frontend, body, created=int(wall_clock()))
        return await respond(
            request,
            generation,
            writer,
            is_stream=bool(body.stream),
            includes_usage=body.includes_usage,
        )


def _add_models(app: FastAPI, frontend: Frontend, wall_clock: Callable[[], float]) -> None:
    card = ModelCard(
        id=frontend.config.served_model_name,
        created=int(wall_clock()),
        max_model_len=frontend.info.max_context,
    )

    @app.get("/v1/models")
    async def models() -> Response:
        return _json(ModelList(data=[card]))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        frontend.check_model(name)
        return _json(card)


def _add_text(app: FastAPI, frontend: Frontend) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await _read(request, frontend, TokenizeRequest)
        frontend.check_model(body.model)
        ids = await _tokenize(frontend, body)
        limit = frontend.info.max_context
        return _json(Tokenized(tokens=ids, count=len(ids), max_model_len=limit))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await _read(request, frontend, DetokenizeRequest)
        frontend.check_model(body.model)
        ids = frontend.checked_ids(body.tokens, "tokens")
        return _json(Detokenized(prompt=frontend.tokenizer.decode(ids, skip_special_tokens=False)))


async def _tokenize(frontend: Frontend, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidParameterError("give one of prompt and messages", param="prompt")
    if body.prompt is not None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return await frontend.tokenize(body.prompt, add_special_tokens=special)
    prompt = await frontend.render(
        body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        template_kwargs=body.chat_template_kwargs,
        is_limited=False,
    )
    ids: list[int] = prompt.token_ids.tolist()
    return ids


def _add_operation(app: FastAPI, frontend: Frontend) -> None:
    @app.get("/health")
    async def health() -> Response:
        error = frontend.client.error
        if error is not None:
            raise EngineDeadError(error.message)
        return Response(b'{"status":"ok"}', media_type=JSON)

    @app.get("/metrics")
    async def metrics() -> Response:
        client = frontend.client
        try:
            stats = await client.stats()
        except (EngineDeadError, BusyError):
            stats = None
        body = frontend.metrics.render(client.info, stats, is_alive=client.is_alive)
        return Response(body, media_type=CONTENT_TYPE)

    @app.get("/v1/cache")
    async def cache() -> Response:
        return _json(await frontend.client.cache_view())

    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        await frontend.client.flush_cache()
        return Response(b'{"status":"ok"}', media_type=JSON)
