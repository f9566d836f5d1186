"""The chat format: special tokens, the template, and how a chat becomes text.

Owns: the names of the special tokens and the template's text; everything else imports them.
Invariant: the text of messages[:i] is a prefix of the text of messages, and a reply followed by
`<|im_end|>` is exactly what the template renders for it.
"""

from __future__ import annotations

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END, *(f"<|reserved_{i}|>" for i in range(13))]
VOCAB_SIZE = 8192
MAX_LENGTH = 8192

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- elif message['content'] -%}
{%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def render_parts(messages: list[dict[str, str]]) -> list[tuple[str, bool]]:
    """The chat's text in pieces `(text, is_reply)`; a reply piece ends with its `<|im_end|>`."""
    parts = []
    for message in messages:
        parts.append((f"{TURN_START}{message['role']}\n", False))
        parts.append((f"{message['content']}{TURN_END}", message["role"] == "assistant"))
        parts.append(("\n", False))
    return parts
