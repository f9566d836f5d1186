"""Which family a config.json belongs to. Owns: the table. Read next: ``qwen3_5.py``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from hyradix.errors import ModelLoadError
from hyradix.models import bamba, granitemoehybrid, kimi_linear, nemotron_h, qwen3_5, qwen3_next
from hyradix.models.config import CacheConfig, ModelConfig, RawConfig

if TYPE_CHECKING:
    import torch


class Family(Protocol):
    """A family file, as a module."""

    MODEL_TYPES: tuple[str, ...]
    ARCHITECTURES: tuple[str, ...]

    def parse_cache(self, raw: RawConfig) -> CacheConfig:
        """config.json to what is kept of a sequence."""

    def parse_config(self, raw: RawConfig, generation: RawConfig) -> ModelConfig:
        """config.json to ``ModelConfig``."""

    def map_name(self, name: str) -> str | None:
        """Checkpoint weight name to the flat form; None: not needed. Draft heads never get here."""

    def recurrent_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Input projections of one recurrent layer, by name within the layer."""

    def recurrent_input(
        self, config: ModelConfig, layer: dict[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Take those out of ``layer``, in the order of our rows (see the mixers)."""


FAMILIES: dict[str, Family] = {
    "qwen3_5": qwen3_5,
    "qwen3_next": qwen3_next,
    "granitemoehybrid": granitemoehybrid,
    "nemotron_h": nemotron_h,
    "bamba": bamba,
    "kimi_linear": kimi_linear,
}


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Whatever a value of the wrong form does to a parser is a ``ModelLoadError``."""
    try:
        yield
    except (TypeError, ValueError, OverflowError, AttributeError, KeyError) as error:
        raise ModelLoadError(f"{source} has a field of the wrong form: {error!r}") from error


def find_family(raw: RawConfig) -> Family:
    """The family of a parsed config.json. Raises ``ModelLoadError`` that names the known ones."""
    model_type = raw.get("model_type")
    architectures = raw.get("architectures") or []
    known: list[str] = []
    for family in FAMILIES.values():
        names = family.ARCHITECTURES
        if model_type in family.MODEL_TYPES or any(name in names for name in architectures):
            return family
        known += names
    raise ModelLoadError(
        f"model type {model_type!r} (architectures {architectures}) is not supported; "
        f"supported: {', '.join(known)}"
    )
