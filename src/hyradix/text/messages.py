"""Chat messages as callers send them, checked and brought into the form that templates expect.

Owns: what a message may look like (OpenAI's form), and keeping its text from turning into
control tokens. Does not know: templates.
Read next: ``chat_template.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hyradix.errors import InvalidParameterError

Message = Mapping[str, Any]

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Noncharacters: Unicode reserves them for internal use."""


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""What the OpenAI API knows; a template may refuse some of them itself."""


def normalize(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of the messages with ``content`` a string and ``cache_control`` removed.

    Text parts are concatenated. A missing or null content becomes "" where it may be missing: in
    an assistant message with ``tool_calls``. The arguments of tool calls become objects.

    Raises:
        InvalidParameterError: ``param`` names the message at fault.
    """
    if not messages:
        raise InvalidParameterError("messages must not be empty", param="messages")
    return [_normalize_one(message, f"messages[{i}]") for i, message in enumerate(messages)]


def is_marked(message: Message) -> bool:
    """Whether the caller asks for a checkpoint at the end of the message (``cache_control``)."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return any(part.get("cache_control") for part in (message, *parts))


def choose_mark(*values: object) -> str:
    """A character that occurs in none of the JSON-like ``values``."""
    used = {char for value in values for text in _texts(value) for char in _MARKS if char in text}
    for mark in _MARKS:
        if mark not in used:
            return mark
    raise InvalidParameterError("the messages use every Unicode noncharacter", param="messages")


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON-like value with ``change`` applied to every string, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {map_texts(k, change): map_texts(v, change) for k, v in value.items()}
    return value


def _texts(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def _normalize_one(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidParameterError(f"{where} must be an object", param=where)
    if not isinstance(message.get("role"), str):
        raise InvalidParameterError(f"{where}.role must be a string", param=f"{where}.role")
    if message["role"] not in ROLES:
        raise InvalidParameterError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {message['role']!r}",
            param=f"{where}.role",
        )
    result = {key: value for key, value in message.items() if key != "cache_control"}
    result["content"] = _text_of(message, where)
    if message.get("tool_calls"):
        result["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return result


def _text_of(message: Message, where: str) -> str:
    content, param = message.get("content"), f"{where}.content"
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(part, param) for part in content)
    if content is not None:
        raise InvalidParameterError(
            f"{param} must be a string or a list of parts, got {type(content).__name__}",
            param=param,
        )
    if message["role"] == "assistant" and message.get("tool_calls"):
        return ""
    raise InvalidParameterError(f"{param} is missing", param=param)


def _part_text(part: object, param: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind != "text":
        raise InvalidParameterError(
            f"{param} has a part of type {kind!r}; only 'text' is supported", param=param
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidParameterError(f"{param} has a text part without text", param=param)
    return text


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidParameterError(f"{where} must be a list of objects", param=where)
    return [_tool_call(call, f"{where}[{i}].function") for i, call in enumerate(calls)]


def _tool_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidParameterError(f"{where} must have a name", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise InvalidParameterError(
                f"{where}.arguments is not JSON: {error}", param=f"{where}.arguments"
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}
