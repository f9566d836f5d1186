"""What a model directory says about its text side, besides ``tokenizer.json`` itself.

Owns: where special tokens, end-of-sequence ids and chat templates are written down.
Does not know: how they are used.
Read next: ``tokenizer.py``, ``chat_template.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hyradix.errors import ModelLoadError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file.

    Raises ``ModelLoadError`` when the file cannot be read or is no JSON object.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path.name}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name} holds no JSON object")
    return value


def special_tokens(directory: Path) -> dict[str, str]:
    """Named special tokens (``bos_token``, ``eos_token``, ..), as templates use them."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json(directory / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def declared_eos_ids(directory: Path) -> tuple[int, ...]:
    """End-of-sequence ids that ``generation_config.json`` names, else ``config.json``."""
    for name in ("generation_config.json", "config.json"):
        config = read_json(directory / name)
        value = config.get("eos_token_id")
        if value is None and isinstance(config.get("text_config"), dict):
            value = config["text_config"].get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if found := tuple(i for i in ids if isinstance(i, int)):
            return found
    return ()


def chat_templates(directory: Path) -> dict[str, str]:
    """Chat templates by name; the main one is ``default``. Empty when the model has none."""
    templates: dict[str, str] = {}
    declared = read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(declared, str):
        templates["default"] = declared
    elif isinstance(declared, list):
        named = [entry for entry in declared if isinstance(entry, dict)]
        templates.update({str(e.get("name")): str(e.get("template", "")) for e in named})
    files = [("default", directory / "chat_template.jinja")]
    extra = directory / "additional_chat_templates"
    files += [(path.stem, path) for path in sorted(extra.glob("*.jinja"))]
    for name, path in files:
        if path.exists():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelLoadError(f"cannot read {path.name}: {error}") from error
    return templates
