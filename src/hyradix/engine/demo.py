"""Where the demo model lies. Owns: its name. Does not know: torch."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

DEMO = "demo"


def demo_directory() -> Path:
    """The directory of the model that comes with the package."""
    return Path(str(resources.files("hyradix") / "demo_model"))
