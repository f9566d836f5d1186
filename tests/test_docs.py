"""What the documentation names exists."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import typer.main

from hyradix.cache.node import StateRef, new_hasher
from hyradix.cache.policy import LRUPolicy
from hyradix.cache.tree import RadixTree
from hyradix.config import Settings
from hyradix.request import MissReason, Namespace
from hyradix.server import cli
from tests.support.markdown import DOCUMENTS, anchors, blocks, links
from tests.support.real_server import ROOT

MORE = [ROOT / "benchmarks/README.md", ROOT / "benchmarks/data/README.md"]
NAME = Namespace()


@pytest.mark.parametrize("document", DOCUMENTS + MORE, ids=lambda p: p.name)
def test_links_resolve(document: Path) -> None:
    for link in links(document):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{document.name}: no heading {link}"


def options_of(*words: str) -> set[str]:
    """The long options that a command has; ``bench engine`` is two words."""
    command = typer.main.get_command(cli.app)
    for word in words:
        if not hasattr(command, "commands"):
            break
        command = command.commands[word]
    return {name for p in command.params for name in p.opts if name.startswith("--")}


def test_serving_lists_every_option() -> None:
    text = (ROOT / "docs/serving.md").read_text()
    listed = set(re.findall(r"`(--[\w-]+)[` ]", text))
    assert listed == options_of("serve") - {"--help"}


def test_defaults_are_those_of_the_settings() -> None:
    text = (ROOT / "docs/serving.md").read_text()
    table = dict(re.findall(r"^\| `--([\w-]+)` \| ([^|]+?) \|", text, re.MULTILINE))
    spelled = {True: "on", False: "off", None: None}
    for field in dataclasses.fields(Settings):
        shown = table.get(field.name.replace("_", "-"))
        default = field.default
        expected = spelled[default] if default in (True, False, None) else str(default)
        if shown is not None and expected is not None and not isinstance(default, int | None):
            assert shown == expected, field.name
        elif shown is not None and isinstance(default, int) and not isinstance(default, bool):
            assert shown == str(default), field.name


def test_typed_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for block in blocks("sh"):
        for line in block.text.splitlines():
            command = line.partition("#")[0].split()
            if command[:1] == ["make"]:
                assert f"\n{command[1]}:" in makefile, line
            elif command[:1] == ["hyradix"]:
                options = options_of(*command[1:3])
                given = {word for word in command if word.startswith("--")}
                assert given <= options, line


@pytest.mark.parametrize("document", MORE[:1], ids=lambda p: p.name)
def test_named_scripts_exist(document: Path) -> None:
    scripts = re.findall(r"`python (\S+?\.py)", document.read_text())
    assert scripts
    for script in scripts:
        assert (ROOT / script).is_file(), script


# ---- the worked example of docs/architecture.md --------------------------------------------------


def ids(text: str) -> bytes:
    return np.array([ord(c) for c in text], dtype="<i4").tobytes()


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def state(slot: int, text: str) -> StateRef:
    hasher = new_hasher(NAME)
    hasher.update(ids(text))
    return StateRef(slot, len(text), hasher.intdigest(), step=0)


def match(tree: RadixTree, text: str):  # type: ignore[no-untyped-def]
    return tree.match_prefix(NAME, ids(text), limit=len(text) - 1)


def test_worked_example() -> None:
    tree = RadixTree(LRUPolicy())
    first = slots(10, 11, 12, 13)
    tree.insert(NAME, ids("ABCD"), first, state(100, "ABCD"), protected_len=0)
    row = slots(10, 11, 12, 13, 30, 31)
    tree.insert(NAME, ids("ABCDEF"), row, state(105, "ABCDEF"), protected_len=4)

    found = match(tree, "ABCDX")  # 1
    assert (found.num_kv_tokens, found.num_cached_tokens) == (4, 4)
    assert found.kv_slots.tolist() == [10, 11, 12, 13]
    assert found.state_node.state.slot == 100

    row = slots(10, 11, 12, 13, 20, 21, 22, 23)  # 2
    done = tree.insert(NAME, ids("ABCDEFGH"), row, state(101, "ABCDEFGH"), protected_len=4)
    assert done.duplicates.tolist() == [20, 21]
    for start, replaced in done.replaced:
        row[start : start + len(replaced)] = replaced
    assert row.tolist() == [10, 11, 12, 13, 30, 31, 22, 23]
    assert (done.node.kv_slots.tolist(), done.node.depth) == ([22, 23], 8)

    found = match(tree, "ABYZ")  # 3
    assert (found.num_kv_tokens, found.num_cached_tokens) == (2, 0)
    assert found.reason is MissReason.NEVER_PLACED
    lower = found.kv_node
    receipt = tree.lock(found)
    upper = receipt.kv_node
    assert (upper.kv_slots.tolist(), upper.depth, upper.state) == ([10, 11], 2, None)
    assert (lower.kv_slots.tolist(), lower.depth, lower.state.slot) == ([12, 13], 4, 100)
    tree.insert(NAME, ids("AB"), slots(10, 11), state(106, "AB"), protected_len=2)
    tree.unlock_kv(receipt)

    tree.take_state(lower, MissReason.EVICTED)  # 4
    assert lower.is_tombstone
    found = match(tree, "ABCDZ")
    assert (found.num_kv_tokens, found.num_cached_tokens) == (4, 2)
    assert found.reason is MissReason.EVICTED
