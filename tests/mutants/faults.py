"""The list of planted faults: read from the TOML files beside this one, applied to a source tree.

A fault names a file under ``src/hyradix``, a text that stands there exactly once, and what replaces
it. Texts, not line numbers: a fault survives every change that leaves its own lines alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = Path("src") / "hyradix"


@dataclass(frozen=True)
class Fault:
    """One mutant. ``place``: the transition of DESIGN 2.1, or the paragraph of 3 or 5."""

    name: str
    place: str
    file: str
    old: str
    new: str

    def mutate(self, source: str) -> str:
        """The source with the fault in it. Raises where it does not apply exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name!r}: its text stands {count} times in {self.file}")
        return source.replace(self.old, self.new)

    @contextmanager
    def planted(self, root: Path) -> Iterator[None]:
        """The fault stands in the source tree under ``root`` for the length of the block."""
        path = root / PACKAGE / self.file
        sound = path.read_text()
        path.write_text(self.mutate(sound))
        try:
            yield
        finally:
            path.write_text(sound)


def load() -> list[Fault]:
    """Every fault, in the order of the design."""
    return [
        Fault(**entry)
        for path in sorted(HERE.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["mutant"]
    ]
