"""Compile, without a GPU, every kernel variant that served models launch; fail where one does not.

    PYTHONPATH=src python benchmarks/gpu_compile_all.py --jobs 2 --json compiled.json

Each model of ``SHAPES`` is built with one layer of each kind and run, launches being collected in
place of run: prefill, mixed steps, decode in place and by a log at many batch sizes, draft trees,
folds, moves. Variants that differ for Triton are compiled for sm_90; registers, spilled bytes and
shared memory are printed where they are out of the ordinary, and so are kernels that ptxas made
wrong (``gpu/machine_code.py``). ``--list`` prints how many variants a kernel has: more than its
constants explain are compiled in the middle of serving.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

from benchmarks.gpu.step_forms import FormMaker  # noqa: E402
from benchmarks.triton_offline import Variant, collected, compile_variant  # noqa: E402
from hyradix.kernels import triton_table  # noqa: E402
from hyradix.kernels.triton_ops import TritonOps  # noqa: E402
from hyradix.models import loader  # noqa: E402
from hyradix.models.config import ModelConfig  # noqa: E402
from hyradix.models.registry import FAMILIES, find_family  # noqa: E402
from tests.support.triton_models import CONFIG as TINY  # noqa: E402

DEMO = ROOT / "src/hyradix/demo_model/config.json"
CONFIGS = ROOT / "benchmarks/configs"
SHAPES = {
    "4b": CONFIGS / "Qwen3.5-4B.json",
    "demo": DEMO,
    "tiny": None,
    "next": CONFIGS / "Qwen3-Next-80B-A3B-Instruct.json",
    "kimi": CONFIGS / "Kimi-Linear-48B-A3B-Instruct.json",
    "granite": CONFIGS / "Granite-4.0-H-Small.json",
    "nemotron": CONFIGS / "NVIDIA-Nemotron-3-Nano-30B-A3B.json",
    "nemotron8": CONFIGS / "Nemotron-H-8B.json",
    "bamba": CONFIGS / "Bamba-9B.json",
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHARED_LIMIT = 227 * 1024
MAX_CONTEXT = 2_048


def main() -> int:
    options = _options()
    triton_table._MULTIPROCESSORS["cpu"] = triton_table._MULTIPROCESSORS["default"]
    found: dict[Any, tuple[Variant, str]] = {}
    for shape in options.shapes.split(","):
        for dtype in options.dtypes.split(","):
            for variant in variants(shape, DTYPES[dtype]):
                found.setdefault(variant.key, (variant, f"{shape} {dtype}"))
    print(f"{len(found)} variants", flush=True)
    if options.list:
        for name, count in Counter(v.name for v, _ in found.values()).most_common():
            print(f"{count:5} {name}")
        return 0
    return _compile(list(found.values()), options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="variants of each kernel, no compiling")
    return parser.parse_args()


def variants(shape: str, dtype: torch.dtype) -> Iterator[Variant]:
    """All launches of a model of that shape."""
    config = _config(shape)
    ops = TritonOps(torch.device("cpu"), dtype)
    with torch.inference_mode(), collected() as found:
        name = "float32" if dtype == torch.float32 else "bfloat16"
        model = loader.build_model(
            config, _weights(config, dtype), ops, dtype=name, max_context=MAX_CONTEXT
        )
        ops.reserve(256, 16)
        maker = FormMaker(config, ops)
        for ids, context in maker.contexts():
            hidden = model.forward(ids, context)
        for rows in (1, 2, 8, 16, 17, 64, 65, 256):
            model.logits(hidden.new_empty(rows, hidden.shape[1]))
        maker.movements()
    yield from found


def _config(shape: str) -> ModelConfig:
    """One layer of each kind."""
    path = SHAPES[shape]
    raw = TINY if path is None else json.loads(path.read_text())
    config = find_family(raw).parse_config(raw, {})
    kinds = list(dict.fromkeys(config.blocks))
    layers, mlps = zip(*kinds, strict=True)
    vocab = config.vocab_size
    return replace(config, layers=layers, mlps=mlps, max_position=MAX_CONTEXT, vocab_size=vocab)


def _weights(config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Memory that nobody touches, where it is large."""
    shapes = loader._shapes(config, FAMILIES[config.family], None)
    return {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}


def _compile(found: list[tuple[Variant, str]], options: argparse.Namespace) -> int:
    global _FOUND
    _FOUND = found
    rows, failed = [], 0
    print(f"{'kernel':28} {'warps':>5} {'regs':>5} {'local':>6} {'shared':>7}  first seen")
    with get_context("fork").Pool(options.jobs) as pool:
        for i, row in pool.imap_unordered(_compile_one, range(len(found))):
            variant, origin = found[i]
            rows.append({"kernel": variant.name, "origin": origin, **row})
            if "error" in row:
                failed += 1
                print(f"{variant.name:28} FAILED {origin}: {row['error']}\n{variant.constants}",
                      flush=True)  # fmt: skip
            elif _is_unusual(row):
                is_over = row["shared"] > SHARED_LIMIT
                failed += is_over or bool(row["faults"])
                word = "TOO LARGE" if is_over else "WRONG" if row["faults"] else ""
                print(f"{variant.name:28} {row['warps']:5} {row['registers']:5} {row['local']:6} "
                      f"{row['shared']:7}  {origin} {word} {variant.constants}",
                      flush=True)  # fmt: skip
    print(f"{len(found)} compiled, {failed} failed", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if failed else 0


def _is_unusual(row: dict[str, Any]) -> bool:
    is_large = row["shared"] > SHARED_LIMIT // 2 or row["registers"] >= 250
    return is_large or row["local"] > 0 or bool(row["faults"])


_FOUND: list[tuple[Variant, str]] = []


def _compile_one(i: int) -> tuple[int, dict[str, Any]]:
    try:
        built = compile_variant(_FOUND[i][0], 90)
    except Exception as error:
        return i, {"error": f"{type(error).__name__}: {str(error)[:1500]}"}
    return i, {
        "warps": built.num_warps, "registers": built.registers, "local": built.local_bytes,
        "shared": built.shared_bytes, "products": built.num_products, "faults": built.faults,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
