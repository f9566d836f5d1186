"""Every exception that Hyradix raises, and the HTTP status each one maps to.

Owns: the exception classes. Does not know: who raises or who renders them.
Invariant: whatever reaches a user is a ``HyradixError``; anything else is a bug of ours (500).
Read next: ``config.py``.
"""

from __future__ import annotations


class HyradixError(Exception):
    """Base class. ``status`` is the HTTP status, ``code`` the OpenAI ``error.code``."""

    status = 500
    code = "internal_error"
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(HyradixError):
    """The caller's request is wrong; nothing was changed. ``param`` names the field at fault."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class InvalidParameterError(RequestError):
    """A parameter has the wrong type or is out of range."""

    code = "invalid_parameter"


class ContextLengthError(RequestError):
    """The prompt is longer than ``max_context`` allows; the message names both numbers."""

    code = "context_length_exceeded"


class CapacityError(RequestError):
    """The request can never fit the pools; the message says what it needs and what there is."""

    code = "capacity_exceeded"


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""

    status = 404
    code = "model_not_found"


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class PayloadTooLargeError(RequestError):
    """The HTTP body exceeds the limit."""

    status = 413
    code = "payload_too_large"


class QueueFullError(HyradixError):
    """Too many requests wait; try again later."""

    status = 429
    code = "queue_full"
    type = "rate_limit_error"


class BusyError(HyradixError):
    """The operation needs an idle engine (flushing the cache, for one)."""

    status = 409
    code = "busy"
    type = "invalid_request_error"


class EngineDeadError(HyradixError):
    """The engine process has died; every open request ends with this."""

    status = 503
    code = "engine_dead"


class RequestFailedError(HyradixError):
    """The engine failed on this one request (non-finite logits, for example)."""

    code = "request_failed"


class ConfigError(HyradixError):
    """A setting is wrong or settings contradict each other. Raised at start-up."""

    code = "invalid_configuration"


class ModelLoadError(HyradixError):
    """A model directory cannot be used: unknown architecture, missing files or weights."""

    code = "model_load_failed"
