"""The model's tokenizer and chat template, as the server process loads them.

Owns: nothing. The one place where the server names ``hyradix.text``.
Read next: ``hyradix/text``.
"""

from __future__ import annotations

from pathlib import Path

from hyradix.server.frontend import ChatTemplate, Tokenizer
from hyradix.text.chat_template import ChatTemplate as ModelChatTemplate
from hyradix.text.tokenizer import Tokenizer as ModelTokenizer


def load_text(directory: Path) -> tuple[Tokenizer, ChatTemplate]:
    """Load both from a model directory. Raises ``ModelLoadError``."""
    tokenizer = ModelTokenizer.from_dir(directory)
    return tokenizer, ModelChatTemplate.from_dir(directory, tokenizer)
