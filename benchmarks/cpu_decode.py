"""Decode and prefill on the CPU against transformers: same weights, same prompts, interleaved.

python benchmarks/cpu_decode.py [--config benchmarks/configs/cpu25m.json] [--rounds 3]

Prints tokens per second (median over rounds) and the ratio within this run; noise moves both
sides alike. Both use the same number of threads and float32.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyradix.runner.threads import prepare_environment

prepare_environment()

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from benchmarks.figures import save, spread  # noqa: E402
from hyradix import LLM, SamplingParams  # noqa: E402
from hyradix.engine.model_source import find_model  # noqa: E402
from hyradix.models.loader import init_random, load_config  # noqa: E402

BATCHES = (1, 8, 32)
PREFILLS = (512, 2048)
PROMPT = 32


def make_checkpoint(config: Path) -> Path:
    """A directory with the config and random weights that both engines load."""
    directory = Path(tempfile.mkdtemp(prefix="cpu_decode_"))
    raw = json.loads(config.read_text())
    (directory / "config.json").write_text(json.dumps(raw))
    weights = init_random(load_config(directory), seed=0)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(find_model("demo") / name, directory / name)
    return directory


def prompts(batch: int, length: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch * 10_000 + length)
    return torch.randint(0, vocab_size, (batch, length), generator=generator).tolist()


class Ours:
    """The offline engine, prefix cache off: every round computes everything."""

    name = "hyradix"

    def __init__(self, directory: Path, args: argparse.Namespace) -> None:
        self.llm = LLM(
            str(directory),
            dtype=args.dtype,
            use_tqdm=False,
            prefix_cache=False,
            num_threads=args.threads,
            max_requests=max(BATCHES),
            max_context=4096,
            kv_slots=max(BATCHES) * 512,
            states=max(BATCHES),
            max_prefill_tokens=0,
        )

    def _generate(self, ids: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        start = time.perf_counter()
        results = self.llm.generate(ids, params, use_tqdm=False)
        return time.perf_counter() - start, [r.outputs[0].token_ids for r in results]

    def decode(self, ids: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds per decode step, and the tokens."""
        first, _ = self._generate(ids, 1)
        whole, tokens = self._generate(ids, new_tokens + 1)
        return (whole - first) / new_tokens, tokens

    def prefill(self, ids: list[int]) -> float:
        """Seconds to the first token."""
        return self._generate([ids], 1)[0]


class Theirs:
    """transformers' generate."""

    name = "transformers"

    def __init__(self, directory: Path, args: argparse.Namespace) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()

    def _generate(self, ids: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        start = time.perf_counter()
        inputs = torch.tensor(ids)
        with torch.inference_mode():
            out = self.model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
        return time.perf_counter() - start, out[:, len(ids[0]) :].tolist()

    def decode(self, ids: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        first, _ = self._generate(ids, 1)
        whole, tokens = self._generate(ids, new_tokens + 1)
        return (whole - first) / new_tokens, tokens

    def prefill(self, ids: list[int]) -> float:
        return self._generate([ids], 1)[0]


def measure(engines: list[Any], rounds: int, run: Callable[[Any], float]) -> dict[str, list[float]]:
    """Seconds of each engine, round by round, interleaved."""
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for _ in range(rounds):
        for engine in engines:
            seconds[engine.name].append(run(engine))
    return seconds


def report(label: str, tokens: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Print one row; return it."""
    rates = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    line = "  ".join(f"{name} {rate:8.1f} tok/s" for name, rate in rates.items())
    row: dict[str, Any] = {
        name: spread([tokens / value for value in values]) for name, values in seconds.items()
    }
    if len(rates) == 2:
        row["ratio"] = round(rates[Ours.name] / rates[Theirs.name], 3)
        line += f"  ratio {row['ratio']:.2f}"
    print(f"{label:14s} {line}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "benchmarks/configs/cpu25m.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ours-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    directory = make_checkpoint(args.config)
    start = time.perf_counter()
    engines: list[Any] = [Ours(directory, args)]
    print(f"hyradix loaded and warm in {time.perf_counter() - start:.1f} s", flush=True)
    if not args.ours_only:
        engines.append(Theirs(directory, args))
    vocab_size = load_config(directory).vocab_size
    rows: dict[str, Any] = {}
    for batch in BATCHES:
        ids = prompts(batch, PROMPT, vocab_size)
        if len(engines) == 2:
            (_, ours), (_, theirs) = (engine.decode(ids, 8) for engine in engines)
            if ours != theirs:
                print("note: greedy tokens differ (random weights give near ties)")
        seconds = measure(
            engines, args.rounds, lambda e, ids=ids: e.decode(ids, args.new_tokens)[0]
        )
        rows[f"decode x{batch}"] = report(f"decode x{batch}", batch, seconds)
    for length in PREFILLS:
        ids = prompts(1, length, vocab_size)
        seconds = measure(engines, args.rounds, lambda e, ids=ids: e.prefill(ids[0]))
        rows[f"prefill {length}"] = report(f"prefill {length}", length, seconds)
    if args.json:
        save(args.json, rows)


if __name__ == "__main__":
    main()
