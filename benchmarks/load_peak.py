"""How much memory does loading take beyond what is held in the end?

    python benchmarks/load_peak.py [--gb 2] [--json benchmarks/results/load_peak.json]

Writes checkpoints of random bfloat16 weights in several shards to a temporary directory (dense
MLPs; experts stored one by one), and loads each in a fresh process, kept as bfloat16 and as
float32, with the progress bar that users see. What counts is the growth of resident memory from
just before the load (modules imported, a tiny model loaded once) to its highest point (VmHWM, reset
before), file pages that are mapped included, over the bytes of the weights that are held in the
end. Exits with 1 if that is over --target, or if the bar did not reach its end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from figures import save
from safetensors.torch import save_file

from hyradix.engine.loading_bar import LoadingBar
from hyradix.models.checkpoint import INDEX
from hyradix.models.loader import load_config, load_model, model_facts
from hyradix.models.pieces import pieces_of
from hyradix.models.registry import FAMILIES
from hyradix.models.shapes import expected_shapes

COMMON = {
    "vocab_size": 65_536, "hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
DENSE = {"model_type": "qwen3_5_text", "intermediate_size": 6144}
EXPERTS = {
    "model_type": "qwen3_next", "intermediate_size": 6144, "num_experts": 64,
    "num_experts_per_tok": 8, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
}  # fmt: skip
MODELS = {"dense": DENSE, "experts": EXPERTS}
SHARDS = 4
TINY = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64}


def write_config(directory: Path, model: str, num_bytes: float) -> None:
    """As many layers, four at a time, as come nearest to ``num_bytes`` of bfloat16."""
    base = {**COMMON, **MODELS[model]}
    raw = base

    def size(num_layers: int) -> int:
        nonlocal raw
        raw = {**base, "num_hidden_layers": num_layers}
        (directory / "config.json").write_text(json.dumps(raw))
        return model_facts(directory, "bfloat16").weight_bytes

    size(min(range(4, 200, 4), key=lambda n: abs(size(n) - num_bytes)))


def write_weights(directory: Path) -> int:
    """Random weights as releases store them: experts one by one. Returns how many there are."""
    config = load_config(directory)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in expected_shapes(config, FAMILIES[config.family]).items():
        pieces = pieces_of(name, shape)
        shapes |= {piece: p.shape for piece, p in pieces.items()} if pieces else {name: shape}
    names, where = list(shapes), {}
    for i in range(SHARDS):
        part = names[i * len(names) // SHARDS : (i + 1) * len(names) // SHARDS]
        file = f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        where |= dict.fromkeys(part, file)
        noise = {name: torch.empty(shapes[name], dtype=torch.bfloat16) for name in part}
        for tensor in noise.values():
            tensor.normal_(0.0, 0.02)
        save_file(noise, directory / file)
    (directory / INDEX).write_text(json.dumps({"weight_map": where}))
    return len(names)


class Memory:
    """Resident bytes of this process, in all and at the highest point; by kind, sampled."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.start = self.read("VmRSS")
        self.sampled = {"RssAnon": 0, "RssFile": 0}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    @staticmethod
    def read(field: str) -> int:
        """A field of /proc/self/status in bytes."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
        raise LookupError(field)

    def _sample(self) -> None:
        while not self._is_over.wait(0.01):
            for kind, most in self.sampled.items():
                self.sampled[kind] = max(most, self.read(kind))

    def peak(self) -> int:
        """Growth to the highest point; ends the samples."""
        self._is_over.set()
        self._thread.join()
        return self.read("VmHWM") - self.start


def load(directory: Path, dtype: str) -> dict[str, Any]:
    """In a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        tiny = {**COMMON, **DENSE, **TINY}
        (Path(name) / "config.json").write_text(json.dumps(tiny))
        load_model(name, load_format="dummy", dtype=dtype)
    news: list[tuple[str, int, int]] = []
    memory, started = Memory(), time.perf_counter()
    with LoadingBar(is_shown=True) as bar:

        def report(stage: str, done: int, total: int) -> None:
            news.append((stage, done, total))
            bar.update(stage, done, total)

        model = load_model(directory, dtype=dtype, on_progress=report)
    seconds, peak = time.perf_counter() - started, memory.peak()
    held = model.weight_bytes
    return {
        "held_bytes": held,
        "peak_bytes": peak,
        "peak_over_held": round(peak / held, 3),
        "resident_at_end_over_held": round((memory.read("VmRSS") - memory.start) / held, 3),
        "sampled_peaks": memory.sampled,
        "seconds": round(seconds, 2),
        "progress": {"updates": len(news), "last": news[-1]},
    }


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Every checkpoint in every type; whether all is well."""
    results: dict[str, Any] = {"counted": "VmHWM less VmRSS before the load, mapped files included"}
    is_well = True
    for model in MODELS:
        with tempfile.TemporaryDirectory(dir=args.dir) as name:
            directory = Path(name)
            write_config(directory, model, args.gb * 1e9)
            count = write_weights(directory)
            for dtype in ("bfloat16", "float32"):
                command = [sys.executable, __file__, "--load", name, "--dtype", dtype]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                result = json.loads(done.stdout)
                print(f"{model} as {dtype}: {json.dumps(result)}", flush=True)
                results[f"{model} as {dtype}"] = {"weights": count, "shards": SHARDS, **result}
                is_well &= result["peak_over_held"] <= args.target
                is_well &= result["progress"]["last"] == ["weights", count, count]
    return results, is_well


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=2.0, help="of bfloat16 weights")
    parser.add_argument("--target", type=float, default=1.3)
    parser.add_argument("--dir", type=Path, help="where the checkpoints are written")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(args.load, args.dtype)))
        return 0
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    results, is_well = measure(args)
    if args.json:
        save(args.json, results)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
