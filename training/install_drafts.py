"""Puts trained draft heads into the shipped folder, beside the target's weights.

    python training/install_drafts.py --heads DIR --package src/hyradix/demo_model

Owns: the index that names both weight files, what config.json says about the heads, and the lines
about them in the card and the notices. DIR is what `train_drafts.py` wrote. Running it again gives
the same files; running it after `evaluate.py --package` restores what that wrote over.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from card import DRAFTS_NOTICE, drafts_text
from draft_model import FROZEN, MTP
from evaluate import SIZE_LIMIT
from safetensors import safe_open
from train_drafts import HEADS_FILE, METRICS_FILE

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
HEADS_LIMIT = 5_900_000
GATE = "{}.layers.0.mlp.gate_proj.weight"


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def write_index(package: Path) -> dict[str, tuple[int, ...]]:
    """Writes the index over both files; returns the shapes of the heads' tensors."""
    weight_map, num_elements = {}, 0
    for name in (WEIGHTS_FILE, HEADS_FILE):
        shapes = read_shapes(package / name)
        weight_map |= dict.fromkeys(sorted(shapes), name)
        for shape in shapes.values():
            size = 1
            for n in shape:
                size *= n
            num_elements += size
    index = {"metadata": {"total_size": 2 * num_elements}, "weight_map": weight_map}
    (package / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")
    return shapes


def write_config(package: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Says in config.json that the heads are there, and what differs from the target's layers."""
    path = package / "config.json"
    config = json.loads(path.read_text())
    sizes = {head: shapes[GATE.format(head)][0] for head in (MTP, FROZEN)}
    config["mtp_num_hidden_layers"] = 1
    config["draft_heads"] = {
        head: {"intermediate_size": size} if size != config["intermediate_size"] else {}
        for head, size in sizes.items()
    }
    path.write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")


def write_words(package: Path, drafts: dict) -> None:
    """The heads' section of the card, their notice, and their numbers in metrics.json."""
    metrics_path, card, notice = (package / n for n in ("metrics.json", "README.md", "NOTICE.md"))
    metrics = json.loads(metrics_path.read_text()) | {"draft_heads": drafts}
    metrics_path.write_text(json.dumps(metrics, indent=1) + "\n")
    text = drafts_text(metrics)
    before = card.read_text(encoding="utf-8").split(text.split("\n\n")[0])[0].rstrip("\n")
    card.write_text(f"{before}\n\n{text}", encoding="utf-8")
    words = notice.read_text(encoding="utf-8")
    if DRAFTS_NOTICE not in words:
        notice.write_text(words + DRAFTS_NOTICE, encoding="utf-8")


def install(heads: Path, package: Path) -> None:
    """All of the above; raises if the sizes are over their limits."""
    if heads.resolve() != package.resolve():
        (package / HEADS_FILE).write_bytes((heads / HEADS_FILE).read_bytes())
    write_config(package, write_index(package))
    write_words(package, json.loads((heads / METRICS_FILE).read_text()))
    size = (package / HEADS_FILE).stat().st_size
    total = sum(p.stat().st_size for p in package.rglob("*") if p.is_file())
    print(f"install: heads of {size:,} bytes, folder of {total:,} bytes")
    assert size <= HEADS_LIMIT, "the draft heads are too large"
    assert total <= SIZE_LIMIT, "the shipped folder is too large"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=Path, required=True, help="folder of train_drafts.py")
    parser.add_argument("--package", type=Path, required=True, help="the shipped folder")
    args = parser.parse_args()
    install(args.heads, args.package)
