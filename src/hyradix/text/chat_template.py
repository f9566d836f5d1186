"""Chat messages to a prompt: text, token ids, and the positions worth a state checkpoint.

Owns: rendering, and where the boundaries of a rendered chat are.
Does not know: the cache, who keeps what.
Invariant: a boundary at position p means that the ids of a shorter chat are exactly the first p
ids of the prompt, so a state taken there serves any other chat that begins in the same way.

Control tokens in messages: the text of a message is content. By default (``escapes_content``)
text that spells a control token, ``<|im_end|>`` say, is tokenised as ordinary text, so nothing
that a user or a fetched document says can open another turn. This needs a tokenizer that works
piece by piece (``Tokenizer.has_pieces``); with others, and with ``escapes_content=False``, such
text is parsed, as other engines do.
Read next: ``messages.py``, ``template_environment.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from hyradix.errors import InvalidParameterError
from hyradix.request import Boundary, Int32Array
from hyradix.text.boundaries import find_boundaries
from hyradix.text.chat_prefixes import ChatPrefixes, PrefixMemo
from hyradix.text.messages import Message, choose_mark, is_marked, map_texts, normalize
from hyradix.text.model_files import chat_templates
from hyradix.text.template_environment import compile_template, make_environment
from hyradix.text.tokenizer import PieceEncoding, Tokenizer

_RESERVED = {"messages", "tools", "add_generation_prompt"}


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A chat as the model sees it. ``boundaries`` are strictly increasing, 0 < position <= n."""

    text: str
    token_ids: Int32Array
    boundaries: tuple[Boundary, ...]


class ChatTemplate:
    """The chat template(s) of one model."""

    def __init__(
        self,
        templates: Mapping[str, str],
        tokenizer: Tokenizer,
        *,
        escapes_content: bool = True,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Args:
        templates: sources by name; ``default``, and ``tool_use`` when tools are given.

        Raises ``ModelLoadError`` for a syntax error.
        """
        environment = make_environment(now)
        self._now = now
        self._memo = PrefixMemo()
        self._templates = {
            name: compile_template(environment, name, source) for name, source in templates.items()
        }
        self._tokenizer = tokenizer
        self._escapes = escapes_content and tokenizer.has_pieces

    @classmethod
    def from_dir(
        cls, path: str | Path, tokenizer: Tokenizer, *, escapes_content: bool = True
    ) -> ChatTemplate:
        """Load from a model directory: ``chat_template.jinja``, else ``tokenizer_config.json``.

        A model without any template loads; ``render`` then says so.
        """
        return cls(chat_templates(Path(path)), tokenizer, escapes_content=escapes_content)

    @property
    def is_available(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Render, tokenise and find the boundaries.

        Args:
            messages: OpenAI's form; see ``messages.normalize``.
            tools: passed to the template.
            template_kwargs: further variables of the template (``enable_thinking``, say).

        Raises:
            InvalidParameterError: malformed messages, or what the template itself raises.
        """
        plain = normalize(messages)
        given = self._variables(template_kwargs, tools)
        mark = ""
        if self._escapes:
            plain, given, mark = self._escape(plain, given)
        variables = {**self._tokenizer.special_tokens, **given}
        template = self._choose(has_tools=bool(tools))

        def render_part(part: list[dict[str, Any]], with_prompt: bool = False) -> str:
            return template.render(variables, messages=part, add_generation_prompt=with_prompt)

        try:
            text = render_part(plain, add_generation_prompt)
        except Exception as error:  # a template is a program: bad input makes it fail in any way
            raise InvalidParameterError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        whole = self._tokenizer.encode_pieces(text, literal_mark=mark)
        context = [variables, self._now().date().isoformat()]
        prefixes = ChatPrefixes(plain, text, render=render_part, memo=self._memo, context=context)
        boundaries = find_boundaries(
            [message["role"] for message in plain],
            [is_marked(message) for message in messages],
            end_of=prefixes.end_of,
            num_tokens_at=self._counter(whole, mark),
        )
        return RenderedPrompt(text.replace(mark, "") if mark else text, whole.ids, boundaries)

    def _counter(self, whole: PieceEncoding, mark: str) -> Callable[[int], int | None]:
        return lambda cut: self._tokenizer.num_prefix_tokens(whole, cut, literal_mark=mark)

    def _escape(
        self, messages: list[dict[str, Any]], variables: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
        """Both with a mark inside each control token's text; and the mark."""

        def change(text: str) -> str:
            return self._tokenizer.mark_control_tokens(text, mark)

        try:
            mark = choose_mark(messages, variables)
            return map_texts(messages, change), map_texts(variables, change), mark
        except RecursionError as error:
            raise InvalidParameterError("messages are nested too deeply") from error

    def _choose(self, *, has_tools: bool) -> jinja2.Template:
        if not self._templates:
            raise InvalidParameterError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        first = self._templates.get("default") or next(iter(self._templates.values()))
        return self._templates.get("tool_use", first) if has_tools else first

    def _variables(
        self, template_kwargs: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> dict[str, Any]:
        extra = dict(template_kwargs or {})
        if taken := sorted(_RESERVED & extra.keys()):
            raise InvalidParameterError(
                f"chat_template_kwargs must not set {', '.join(taken)}",
                param="chat_template_kwargs",
            )
        return {**extra, "tools": list(tools) if tools else None}
