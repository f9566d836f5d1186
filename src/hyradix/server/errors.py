"""Errors on the wire: OpenAI's error object, from whatever went wrong.

Owns: the shape of error bodies and the handlers that make them. Does not know: who raised.
Invariant: every response with a status of 400 or more carries this shape.
Read next: ``app.py``.
"""

from __future__ import annotations

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from hyradix.errors import HyradixError, RequestError

JSON = "application/json"
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; seen by logs and metrics only."""


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What OpenAI's clients read."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    """The whole body of an error response, and the data of an error event in a stream."""

    error: ErrorDetail


class RoutingError(RequestError):
    """The framework refused a request: no such path, or not this method."""

    def __init__(self, message: str, *, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def encode_error(error: HyradixError) -> bytes:
    """The error as JSON."""
    detail = ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.code)
    return msgspec.json.encode(ErrorBody(error=detail))


def error_response(error: HyradixError) -> Response:
    """The error as a response with its status."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return Response(encode_error(error), error.status, headers, JSON)


def install_handlers(app: FastAPI) -> None:
    """Make every exception of ``app`` an OpenAI-shaped response."""

    async def on_hyradix_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HyradixError)
        return error_response(error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {
            404: f"there is no {request.url.path}",
            405: f"{request.method} is not allowed for {request.url.path}",
        }.get(error.status_code, str(error.detail))
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        response = error_response(RoutingError(message, status=error.status_code, code=code))
        response.headers.update(error.headers or {})
        return response

    async def on_client_gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody reads it

    async def on_bug(_request: Request, _error: Exception) -> Response:
        # Starlette raises it again after this response, so that the log has the traceback.
        return error_response(HyradixError("internal error; the server's log says more"))

    app.add_exception_handler(HyradixError, on_hyradix_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientDisconnect, on_client_gone)
    app.add_exception_handler(Exception, on_bug)
