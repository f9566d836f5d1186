"""Which family a config.json belongs to. Owns: the table. Read next: ``qwen3_5.py``."""

from __future__ import annotations

from typing import Protocol

import torch

from hyradix.errors import ModelLoadError
from hyradix.models import qwen3_5, qwen3_next
from hyradix.models.config import ModelConfig, RawConfig


class Family(Protocol):
    """A family file, as a module."""

    MODEL_TYPES: tuple[str, ...]
    ARCHITECTURES: tuple[str, ...]

    def parse_config(self, raw: RawConfig, generation: RawConfig) -> ModelConfig:
        """config.json to ``ModelConfig``."""

    def map_name(self, name: str) -> str | None:
        """Checkpoint weight name to the flat form; None: not needed."""

    def recurrent_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Input projections of one recurrent layer, by name within the layer."""

    def recurrent_input(self, config: ModelConfig, layer: dict[str, torch.Tensor]) -> torch.Tensor:
        """Those as one matrix: q, k, v, z, b, a."""


FAMILIES: dict[str, Family] = {"qwen3_5": qwen3_5, "qwen3_next": qwen3_next}


def find_family(raw: RawConfig) -> Family:
    """The family of a parsed config.json. Raises ``ModelLoadError`` that names the known ones."""
    model_type = raw.get("model_type")
    architectures = raw.get("architectures") or []
    for family in FAMILIES.values():
        if model_type in family.MODEL_TYPES or set(architectures) & set(family.ARCHITECTURES):
            return family
    known = [name for family in FAMILIES.values() for name in family.ARCHITECTURES]
    raise ModelLoadError(
        f"model type {model_type!r} (architectures {architectures}) is not supported; "
        f"supported: {', '.join(known)}"
    )
