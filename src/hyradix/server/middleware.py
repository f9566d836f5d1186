"""What stands before every endpoint: the API key, the size of the body, counting responses.

Owns: these three. Plain ASGI, so that ``receive`` reaches the endpoints as the server made it
(their watch for clients that leave needs that). Does not know: endpoints.
Read next: ``app.py``.
"""

from __future__ import annotations

import asyncio
import hmac

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hyradix.errors import AuthenticationError, PayloadTooLargeError
from hyradix.server.errors import error_response
from hyradix.server.metrics import ServerMetrics

OPEN_PATHS = frozenset({"/health", "/metrics"})
DISCARD_BYTES = 64 << 20
DISCARD_S = 5.0


class ApiKeyMiddleware:
    """Answers 401 unless ``Authorization: Bearer KEY`` is right (``OPEN_PATHS`` need none)."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = AuthenticationError("the API key is missing or wrong")
        await error_response(error)(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)


class CountingMiddleware:
    """Counts responses by method, route and status."""

    def __init__(self, app: ASGIApp, *, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_and_count)
        except Exception:
            # A bug: the response with status 500 is made further out.
            self._count(scope, 500)
            raise

    def _count(self, scope: Scope, status: int) -> None:
        # The route, not the path: clients choose paths, and each label value is kept.
        path = getattr(scope.get("route"), "path", "other")
        self._metrics.http_requests.labels(scope["method"], path, str(status)).inc()


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises ``PayloadTooLargeError``, whether its length was announced or not.

    Of a body that is too long a part is read and thrown away first: a client that is still
    sending would otherwise see its connection reset instead of the answer.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes and "expect" in request.headers:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    stream = request.stream()
    async for chunk in stream:
        size += len(chunk)
        if size > max_bytes:
            await _discard(request)
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


async def _discard(request: Request) -> None:
    size = 0
    try:
        async with asyncio.timeout(DISCARD_S):
            while size < DISCARD_BYTES:
                message = await request.receive()
                size += len(message.get("body", b""))
                if not message.get("more_body"):
                    return
    except TimeoutError:
        return


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body is larger than the limit of {max_bytes} bytes")
