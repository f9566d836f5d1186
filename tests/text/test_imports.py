"""The text floor is control plane: it loads without torch."""

from __future__ import annotations

import subprocess
import sys


def test_text_is_imported_without_torch() -> None:
    names = "chat_template, output_stream, parsers, tokenizer"
    code = f"from hyradix.text import {names}; import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
