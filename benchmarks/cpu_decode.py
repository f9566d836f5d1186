"""Decode and prefill on the CPU against transformers: same weights, same prompts, interleaved.

python benchmarks/cpu_decode.py [--config benchmarks/configs/cpu25m.json] [--rounds 3]

Prints tokens per second (median over rounds) and the ratio within this run; noise moves both
sides alike. Both use the same number of threads and float32.
"""

from __future__ import annotations

import argparse
import json
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
from tests.support.player import Player  # noqa: E402

from hyradix.models.loader import init_random, load_config, load_model  # noqa: E402

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
    return directory


def prompts(batch: int, length: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch * 10_000 + length)
    return torch.randint(0, vocab_size, (batch, length), generator=generator).tolist()


class Ours:
    """Driven through the runner with hand-made batches."""

    name = "hyradix"

    def __init__(self, directory: Path, args: argparse.Namespace) -> None:
        self.model = load_model(directory, dtype=args.dtype, backend=args.backend, max_context=4096)
        self.threads = args.threads
        self._player(1).runner.warm_up()

    def _player(self, batch: int) -> Player:
        return Player(
            self.model,
            keep_logits=False,
            max_requests=batch,
            max_context=4096,
            kv_slots=batch * 4096,
            states=batch,
            num_threads=self.threads,
        )

    def decode(self, ids: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds per decode step, and the tokens."""
        player = self._player(len(ids))
        rows = [player.add(tokens) for tokens in ids]
        player.step({row: len(tokens) for row, tokens in zip(rows, ids, strict=True)})
        work = dict.fromkeys(rows, 1)
        start = time.perf_counter()
        for _ in range(new_tokens):
            player.step(work)
        spent = (time.perf_counter() - start) / new_tokens
        return spent, [player.rows[row].tokens[len(ids[0]) :] for row in rows]

    def prefill(self, ids: list[int]) -> float:
        """Seconds to the first token."""
        player = self._player(1)
        row = player.add(ids)
        start = time.perf_counter()
        player.step({row: len(ids)})
        return time.perf_counter() - start


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


def measure(engines: list[Any], rounds: int, run: Callable[[Any], float]) -> dict[str, float]:
    """Median seconds of each engine; rounds interleaved."""
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for _ in range(rounds):
        for engine in engines:
            seconds[engine.name].append(run(engine))
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(label: str, tokens: int, seconds: dict[str, float]) -> None:
    rates = {name: tokens / value for name, value in seconds.items()}
    line = "  ".join(f"{name} {rate:8.1f} tok/s" for name, rate in rates.items())
    if len(rates) == 2:
        line += f"  ratio {rates[Ours.name] / rates[Theirs.name]:.2f}"
    print(f"{label:14s} {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "benchmarks/configs/cpu25m.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="auto")
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
    for batch in BATCHES:
        ids = prompts(batch, PROMPT, vocab_size)
        if len(engines) == 2:
            (_, ours), (_, theirs) = (engine.decode(ids, 8) for engine in engines)
            if ours != [row[:9] for row in theirs]:
                print("note: greedy tokens differ (random weights give near ties)")
        seconds = measure(
            engines, args.rounds, lambda e, ids=ids: e.decode(ids, args.new_tokens)[0]
        )
        report(f"decode x{batch}", batch, seconds)
    for length in PREFILLS:
        ids = prompts(1, length, vocab_size)
        seconds = measure(engines, args.rounds, lambda e, ids=ids: e.prefill(ids[0]))
        report(f"prefill {length}", length, seconds)


if __name__ == "__main__":
    main()
