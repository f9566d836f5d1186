"""The Jinja environment in which chat templates run, as ``transformers`` sets it up.

Owns: the sandbox, and the functions and filters that templates of models rely on.
Does not know: messages, tokens.
Source: the environment of transformers' ``chat_template_utils`` (behaviour, checked by a test).
Read next: ``chat_template.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hyradix.errors import ModelLoadError


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it as a set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def make_environment(now: Callable[[], datetime]) -> jinja2.Environment:
    """A sandbox whose ``strftime_now`` reads the clock ``now``."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def compile_template(environment: jinja2.Environment, name: str, source: str) -> jinja2.Template:
    """Raises ``ModelLoadError`` naming the line of a syntax error."""
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelLoadError(f"chat template {name!r}, line {error.lineno}: {error}") from error
