"""A checkpoint on disk: where it is, its JSON files, its safetensors shards.

Owns: finding (or downloading) a directory, and where in it each weight lies, with an error for
everything that can be wrong with it. Does not know: what the weights mean.
Invariant: safetensors only; no code of a checkpoint is ever run.
Read next: ``stored.py``, ``loader.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from hyradix.errors import ModelLoadError
from hyradix.models.stored import StoredTensor

ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
Progress = Callable[[str, int, int], None]
"""(stage, done, total): called as work goes on."""
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def find_directory(model: str, *, on_progress: Progress | None = None) -> Path:
    """A directory as it is, or a hub name downloaded (or found in the local cache)."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ModelLoadError(f"{model} is neither a directory nor a hub name (owner/name)")
    report = on_progress or _silent
    report("download", 0, 1)
    try:
        local = huggingface_hub.snapshot_download(model, allow_patterns=ALLOW_PATTERNS)
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"{model} is not a directory here, and the hub cannot be reached to download it"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelLoadError(f"{model} cannot be downloaded: {error}") from error
    report("download", 1, 1)
    return Path(local)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ``ModelLoadError`` if the file is missing or is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path.parent} has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return value


def shard_paths(directory: Path) -> list[Path]:
    """The safetensors files. Raises ``ModelLoadError`` naming those that are not there."""
    if (directory / INDEX).exists():
        names = sorted(set(read_json(directory / INDEX).get("weight_map", {}).values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelLoadError(f"{directory} lacks {listed(missing)}, named in {INDEX}")
        return [directory / name for name in names]
    paths = sorted(directory.glob("*.safetensors"))
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    if not paths:
        raise ModelLoadError(f"{directory} has no safetensors files (no other format is read)")
    return paths


def has_weights(directory: Path) -> bool:
    """Whether there is any safetensors file."""
    return any(directory.glob("*.safetensors"))


def weight_names(directory: Path) -> list[str]:
    """Names of all weights, from the index or the headers; none where there are no files."""
    if (directory / INDEX).exists():
        return list(read_json(directory / INDEX).get("weight_map", {}))
    return list(weights_in(shard_paths(directory))) if has_weights(directory) else []


def weights_in(paths: list[Path]) -> dict[str, StoredTensor]:
    """Every weight by name, from the files' headers; a name in several files is the last one's."""
    found: dict[str, StoredTensor] = {}
    for path in paths:
        header, first_byte = _read_header(path)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in DTYPES:
                raise ModelLoadError(
                    f"{path}: {name} is {entry['dtype']}; quantised weights are not supported, "
                    f"only {', '.join(DTYPES)}"
                )
            first = first_byte + entry["data_offsets"][0]
            shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
            found[name] = StoredTensor(path, first, shape, dtype)
    return found


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, which the library has found to fit the file; and where the data begins."""
    try:
        with safe_open(path, framework="pt"), path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return json.loads(file.read(size)), 8 + size
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged or not a safetensors file: {error}") from error


def listed(names: list[str]) -> str:
    """At most eight names, and how many more there are."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _silent(stage: str, done: int, total: int) -> None:
    """The default progress callback."""
