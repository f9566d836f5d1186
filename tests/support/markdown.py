"""Fenced blocks and links of the documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.real_server import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: ``bash`` and ``python`` run as they are, ``sh`` is for people to type."""

    document: Path
    number: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.document.name}-{self.language}-{self.number}"


def blocks(*languages: str) -> list[Block]:
    """All blocks in the given languages."""
    found = []
    for document in DOCUMENTS:
        for number, (language, text) in enumerate(_FENCE.findall(document.read_text()), start=1):
            if language in languages:
                found.append(Block(document, number, language, text))
    return found


def links(document: Path) -> list[str]:
    """Targets of a document's links, blocks left out."""
    return _LINK.findall(_FENCE.sub("", document.read_text()))


def anchors(document: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
