"""Which files a model is made of: a checkpoint's, or a config alone with random weights.

Owns: finding them, and the tokenizer that stands in where a config has none beside it.
Does not know: what is in them beyond the size of the vocabulary.
Read next: ``build.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hyradix.config import Settings
from hyradix.engine.demo import DEMO, demo_directory
from hyradix.errors import ConfigError
from hyradix.models.checkpoint import find_directory
from hyradix.models.loader import load_config
from hyradix.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
_TOKENIZERS = ("tokenizer.json", "tiktoken.model")
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """model: a directory, or a config file whose weights are drawn. text: the tokenizer's.

    note: what its user should know; empty: nothing.
    """

    name: str
    model: Path
    text: Path
    is_random: bool = False
    note: str = ""


def find_model(name: str, on_progress: Progress | None = None) -> Path:
    """The directory of a model: ``demo``, a path, or a hub name. Raises ``ModelLoadError``."""
    if name == DEMO:
        return demo_directory()
    return find_directory(name, on_progress=on_progress).resolve()


def find_source(settings: Settings, on_progress: Progress | None = None) -> ModelSource:
    """What ``settings`` names. Raises ``ConfigError`` and ``ModelLoadError``."""
    if settings.random_weights is not None:
        return _random_source(settings.random_weights, settings.model)
    directory = find_model(settings.model, on_progress)
    name = "hyradix-demo" if settings.model == DEMO else settings.model.rstrip("/")
    if Path(name).is_dir():
        name = directory.name
    return ModelSource(name, directory, directory)


def _random_source(config: str, model: str) -> ModelSource:
    if model != DEMO:
        raise ConfigError(
            f"--random-weights draws a model of its own: it cannot be had with --model {model}",
            param="random_weights",
        )
    path = Path(config).expanduser().resolve()
    if path.is_dir():
        path /= _CONFIG
    if not path.is_file():
        raise ConfigError(
            f"--random-weights takes a config.json or its directory, and there is no {path}",
            param="random_weights",
        )
    directory = path.parent
    name = directory.name if path.name == _CONFIG else path.stem
    has_text = path.name == _CONFIG and any((directory / x).is_file() for x in _TOKENIZERS)
    model_path = directory if path.name == _CONFIG else path
    text, note = (directory, "") if has_text else _stand_in(path)
    return ModelSource(f"random-{name}", model_path, text, is_random=True, note=note)


def _stand_in(config: Path) -> tuple[Path, str]:
    """The demo model's tokenizer, whose ids every larger vocabulary has too; what to say of it."""
    text = demo_directory()
    needed, size = Tokenizer.from_dir(text).vocab_size, load_config(config).vocab_size
    if size < needed:
        raise ConfigError(
            f"{config} has no tokenizer beside it, and a vocabulary of {size} is too small for the "
            f"demo model's ({needed})",
            param="random_weights",
        )
    note = (
        f"{config.name} has no tokenizer: text is read and written by the demo model's ({needed} "
        f"of {size} token ids); token ids are taken as they are"
    )
    return text, note
