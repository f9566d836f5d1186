"""Hyradix: a serving engine for hybrid language models.

``LLM`` and ``SamplingParams`` are what most programs need. Names load on first use, so that the
control plane (``hyradix.scheduler``, ``hyradix.cache``) can be imported without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyradix.engine.llm import LLM
    from hyradix.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "hyradix.engine.llm", "SamplingParams": "hyradix.request"}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hyradix' has no attribute {name!r}")
