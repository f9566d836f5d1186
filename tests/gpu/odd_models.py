"""Models of any sizes on a device: what no release has and no table was made for.

    PYTHONPATH=.:src python -m tests.gpu.odd_models --models 40 --budget 300 --json OUT

A seed draws a family, its sizes and how it is served. Then its logits, by whatever is a chunk, a
decode or a state gone on from, are those of a cold float32 forward by torch on the CPU; and
schedules with the cache, preemption, the log or drafts say what its cold runs say. With ``--dtype
bfloat16`` logits alone, as near as torch's on the CPU in that type. ``--device cpu --backend
compiled`` asks the same of the CPU's kernels. One process a model, several side by side: a model
that ends one leaves the others alone. Exits with 1 where one was wrong, ended badly or ran out of
time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import FRAME
from benchmarks.gpu_session import run_limited
from benchmarks.gpu_stages import Stage, environment
from hyradix.errors import HyradixError
from hyradix.models.decoder import Decoder
from tests.gpu.models import SMALL, Raw, SmallEngines, drawn, with_all_experts
from tests.gpu.taught import FACTORS, FLOORS, LIMIT, Taught, expected, half_and_all, play
from tests.oracles.schedules import TINY, Judge, Sizes, make_reference, run

NEAR_TIE = 1e-2
"""Of logits that are hundreds."""
NUM_SPOKEN = 4
DIMS = (6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 136, 160, 192, 256)
SMALL_DIMS = DIMS[:6]
"""For the interpreter."""
GROUPS = (1, 1, 2, 3, 4)
SIZES = Sizes(documents=(40, 90, 150), longest=200, max_tokens=24, num_requests=(5, 6))
CHAIN = {"spec": "ngram", "spec_topk": 1}
TREE = {"spec": "ngram", "spec_topk": 3, "spec_steps": 3}
WAYS: tuple[dict[str, Any], ...] = (
    {"overlap": True, "decode_log": 0},
    {"overlap": True, "decode_log": 4},
    {"overlap": True, "decode_log": 16},
    {"overlap": False, "decode_log": 8},
    {**CHAIN, "spec_steps": 2, "spec_state": "log"},
    {**CHAIN, "spec_steps": 6, "spec_state": "snapshot"},
    {**TREE, "spec_nodes": 7, "spec_state": "replay"},
    {**TREE, "spec_nodes": 12, "spec_state": "log"},
    {**TREE, "spec_topk": 4, "spec_steps": 6, "spec_nodes": 40, "spec_state": "log"},
)


def draw(rng: random.Random, dims: tuple[int, ...]) -> Raw:
    """A ``config.json`` of any family."""
    family = rng.choice(list(SMALL))
    kv_heads = rng.choice(GROUPS)
    num_layers = rng.randint(2, 4)
    kinds = [rng.random() < 0.4 for _ in range(num_layers)]  # of attention
    kinds[rng.randrange(num_layers)] = True
    if all(kinds):
        kinds[0] = False
    hidden = rng.choice((16, 24, 40, 64, 72, 136, 256))
    head_dim = rng.choice(dims)
    is_whole = head_dim % 8 or rng.random() < 0.5
    shared: Raw = {
        **SMALL[family],
        "vocab_size": rng.randint(29, 600),
        "hidden_size": hidden,
        "intermediate_size": rng.choice(DIMS),
        "num_hidden_layers": num_layers,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * rng.choice(GROUPS),
        "head_dim": head_dim,
        "partial_rotary_factor": 1.0 if is_whole else rng.choice((0.25, 0.5)),
        "attention_multiplier": head_dim**-0.5,
        "tie_word_embeddings": False,
    }
    key_heads, width = rng.choice(GROUPS), rng.choice((2, 3, 4, 4))
    value_heads = key_heads * rng.choice(GROUPS)
    if family == "kimi_linear":
        return shared | _kimi(rng, dims, kinds, width)
    names = ["full_attention" if kind else "linear_attention" for kind in kinds]
    if family in ("qwen3_5", "qwen3_next"):
        return shared | {
            "layer_types": names,
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": rng.choice(dims),
            "linear_value_head_dim": rng.choice(dims),
            "linear_conv_kernel_dim": width,
        }
    mamba: Raw = {"mamba_n_groups": key_heads, "mamba_d_conv": width}
    mamba["mamba_d_state"] = rng.choice(dims)
    if family == "nemotron_h":
        letters = "".join("*" if kind else "M" for kind in kinds) + rng.choice(("-", "E", "E-", ""))
        return shared | {
            "hybrid_override_pattern": letters,
            "num_hidden_layers": len(letters),
            "mamba_num_heads": value_heads,
            "mamba_head_dim": rng.choice(dims),
            "n_groups": key_heads,
            "ssm_state_size": mamba["mamba_d_state"],
            "conv_kernel": width,
        }
    inner_dim, heads = rng.choice(dims), 2 * value_heads
    mamba |= {"mamba_n_heads": heads, "mamba_d_head": inner_dim, "mamba_expand": 1}
    mamba["hidden_size"] = heads * inner_dim
    if family == "bamba":
        mamba["attn_layer_indices"] = [i for i, kind in enumerate(kinds) if kind]
    else:
        mamba["layer_types"] = ["attention" if kind else "mamba" for kind in kinds]
    return shared | mamba


def _kimi(rng: random.Random, dims: tuple[int, ...], kinds: list[bool], width: int) -> Raw:
    layers = {
        "kda_layers": [i for i, kind in enumerate(kinds, 1) if not kind],
        "full_attn_layers": [i for i, kind in enumerate(kinds, 1) if kind],
        "head_dim": rng.choice(dims),
        "num_heads": rng.choice(GROUPS),
        "short_conv_kernel_size": width,
    }
    heads = rng.choice(GROUPS)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": None,
        "kv_lora_rank": rng.choice((12, 40, 64, 96, 256, 512) if max(dims) > 64 else (12, 20)),
        "qk_nope_head_dim": rng.choice(dims),
        "qk_rope_head_dim": rng.choice((5, 8, 32, 64) if max(dims) > 64 else (5, 8)),
        "v_head_dim": rng.choice(dims),
        "linear_attn_config": layers,
    }


@dataclass(frozen=True)
class Place:
    """Where models run, and in which type."""

    device: str = "cuda"
    backend: str = "triton"
    dtype: str = "float32"

    @property
    def is_interpreted(self) -> bool:
        return self.backend == "triton" and self.device == "cpu"


def check(seed: int, place: Place) -> dict[str, Any]:
    """What the seed drew, and how far it is from what it should be."""
    rng = random.Random(seed)
    raw = draw(rng, SMALL_DIMS if place.is_interpreted else DIMS)
    is_rounded = place.dtype == "bfloat16"
    raw = with_all_experts(raw) if is_rounded else raw
    log = rng.choice((0, 4, 16))
    is_served = rng.random() < 0.75 and place.backend == "triton"
    entry: dict[str, Any] = {"seed": seed, "config": raw, "log": log}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(raw))
        twin = drawn(directory, "torch", "cpu", "float32", num_spoken=NUM_SPOKEN)
        rounded = drawn(directory, "torch", "cpu", place.dtype, num_spoken=NUM_SPOKEN)
        try:
            model = drawn(
                directory, place.backend, place.device, place.dtype, num_spoken=NUM_SPOKEN
            )
        except HyradixError as error:
            return entry | {"refused": str(error)}
    player = Taught(
        model, has_device_runner=is_served, decode_log=log, max_requests=5, max_prefill_tokens=64,
        kv_slots=512, states=10,
    )  # fmt: skip
    play(player, 6 if place.is_interpreted else 40)
    cold, found = expected(twin, player), list(player.found())
    limits = [LIMIT, LIMIT]
    if is_rounded:
        said = expected(rounded, player)
        errors = half_and_all(((row, at, said[row][at]) for row, at, _ in found), cold)
        limits = [f * e + least for f, e, least in zip(FACTORS, errors, FLOORS, strict=True)]
    entry |= {"positions": len(found), "errors": half_and_all(found, cold), "limits": limits}
    return entry if is_rounded else entry | serve(model, twin, rng, is_small=place.is_interpreted)


def serve(model: Decoder, twin: Decoder, rng: random.Random, *, is_small: bool) -> dict[str, Any]:
    """Schedules in one of the ways, against the twin's cold runs."""
    way, preempt = rng.choice(WAYS), rng.choice((0, 5, 11))
    token_ids = range(model.config.vocab_size)
    tally = run(
        SmallEngines(model), 1 if is_small else 3, rng.randrange(1000), min_gain=1,
        sizes=dataclasses.replace(TINY if is_small else SIZES, token_ids=token_ids),
        judges=[Judge("cpu", make_reference(SmallEngines(twin)), NEAR_TIE)],
        force_preempt_every=preempt, **way,
    )  # fmt: skip
    counts = ("requests", "cached_tokens", "preemptions", "accepted_tokens")
    found: dict[str, Any] = {"way": way, **{key: getattr(tally, key) for key in counts}}
    return found | {"near_ties": len(tally.near_ties), "failures": tally.failures}


def is_right(entry: dict[str, Any]) -> bool:
    """A model that is refused is: with a reason, before it serves."""
    if "errors" not in entry:
        return "refused" in entry
    pairs = zip(entry["errors"], entry["limits"], strict=True)
    return all(error < limit for error, limit in pairs) and not entry.get("failures")


def check_apart(seed: int, place: Place, limit_s: float) -> dict[str, Any]:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "found.json"
        command = [sys.executable, "-m", "tests.gpu.odd_models", "--seed", str(seed)]
        command += [f"--{key}={value}" for key, value in dataclasses.asdict(place).items()]
        command += ["--models", "1", "--json", str(path), "--here"]
        started = time.monotonic()
        code, output = run_limited(command, environment(Stage("", limit_s)), limit_s)
        seconds = round(time.monotonic() - started, 1)
        if path.exists():
            return {**json.loads(path.read_text())["models"][0], "seconds": seconds}
        ended = "out of time" if code is None else f"exit code {code}"
        return {"seed": seed, "ended": ended, "output": output[-3000:], "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="triton", choices=("triton", "compiled", "torch"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--budget", type=float, default=600.0, help="seconds: no new one after it")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of a model")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--here", action="store_true", help="one after the other in this process")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    place = Place(args.device, args.backend, args.dtype)
    started = time.monotonic()

    def one(seed: int) -> dict[str, Any] | None:
        if time.monotonic() - started > args.budget:
            return None
        if args.here:
            return check(seed, place)
        return check_apart(seed, place, args.limit)

    seeds = range(args.seed, args.seed + args.models)
    with ThreadPoolExecutor(1 if args.here else args.workers) as pool:
        entries = [entry for entry in pool.map(one, seeds) if entry is not None]
    wrong = [entry for entry in entries if not is_right(entry)]
    for entry in wrong:
        print(json.dumps(entry, indent=1))
    largest = max((entry["errors"][1] for entry in entries if "errors" in entry), default=0.0)
    ended = sum("errors" not in entry for entry in entries)
    print(
        f"{len(entries)} models, {ended} refused or ended, {len(wrong)} wrong; largest error"
        f" {largest:.1e}"
    )
    if args.json:
        args.json.write_text(json.dumps({**FRAME, "models": entries}, indent=1) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
