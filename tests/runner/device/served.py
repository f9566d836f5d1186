"""Engines on a tiny random model: the data plane under test, and the synchronous twin in torch.

``Traffic`` is the same requests, arriving and leaving at the same steps, for every engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hyradix.cache.prefix_cache import PrefixCache
from hyradix.config import DeviceFacts, EngineConfig, Settings, resolve
from hyradix.engine.build import _info
from hyradix.engine.demo import demo_directory
from hyradix.engine.engine import Engine
from hyradix.engine.messages import RequestOutput
from hyradix.kernels.ops import load_ops
from hyradix.models.decoder import Decoder
from hyradix.models.loader import DTYPES, build_model, init_random, load_config, model_facts
from hyradix.request import Boundary, BoundaryKind, Request, SamplingParams
from hyradix.runner.runner import ModelRunner
from hyradix.sampling.sampler import Sampler
from hyradix.text.tokenizer import Tokenizer

VOCAB = 61
CONFIG = {
    "model_type": "qwen3_5_text", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
SIZES = {
    "max_requests": 3, "max_context": 128, "kv_slots": 160, "states": 12, "num_threads": 1,
    "max_prefill_tokens": 16, "track_interval": 4, "min_gain": 1, "check_invariants": True,
}  # fmt: skip
POISON = float("nan")


@dataclass(frozen=True)
class Arrival:
    """A request that comes at a step, and is aborted some steps later where that is said."""

    at: int
    request: Request
    abort_at: int | None = None


class World:
    """One model of random weights, built once for each backend. They are large enough that what is
    said depends on all that came before."""

    def __init__(self, directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps(CONFIG))
        self.directory = directory
        self._config = load_config(directory)
        self._models: dict[tuple[str, ...], Decoder] = {}
        self._tokenizer = Tokenizer.from_dir(demo_directory())

    def model(self, backend: str, device: str = "cpu", dtype: str = "float32") -> Decoder:
        """The same random weights on every backend."""
        key = (backend, device, dtype)
        if key not in self._models:
            ops = load_ops(backend, device=device, dtype=DTYPES[dtype])
            self._models[key] = build_model(self._config, self.weights(), ops, dtype=dtype)
        return self._models[key]

    def weights(self) -> dict[str, torch.Tensor]:
        """By flat name."""
        drawn = init_random(self._config, seed=1)
        return {name: x * 12.0 if x.std() < 0.05 else x for name, x in drawn.items()}

    def config(self, model: Decoder, **options: Any) -> EngineConfig:
        """Of a small engine."""
        is_wide = model.ops.dtype == torch.float32
        kind = ("float32", "cpu") if is_wide else ("bfloat16", "cuda")
        facts = model_facts(model.config, kind[0], device=kind[1])
        device = DeviceFacts(kind="cpu", free_bytes=1 << 33)
        return resolve(Settings(**{**SIZES, **options}), facts, device)

    def engine(self, model: Decoder, make: Callable[..., Any], **options: Any) -> Engine:
        """On what ``make(model, config, sampler)`` gives."""
        config = self.config(model, **options)
        sampler = Sampler(config.max_requests, config.vocab_size, config.eos_token_ids)
        runner = make(model, config, sampler)
        info = _info(config, model_facts(model.config), self.directory, 0.0)
        return Engine(config, runner, self._tokenizer, info)

    def twin(self, **options: Any) -> Engine:
        """Synchronous, in torch, on the CPU."""
        return self.engine(self.model("torch"), ModelRunner, **options)


def tokens(count: int, seed: int) -> list[int]:
    """Random ids."""
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def arrival(
    at: int, prompt: Sequence[int], *, abort_at: int | None = None, marks: Sequence[int] = (),
    **sampling: Any,
) -> Arrival:  # fmt: skip
    """Greedy and 9 tokens long unless told."""
    params = SamplingParams(**{"max_tokens": 9, "temperature": 0.0, "ignore_eos": True, **sampling})
    request = Request(
        request_id=f"{at}-{len(prompt)}-{sum(prompt)}",
        prompt_token_ids=np.array(prompt, "<i4").tobytes(),
        sampling=params,
        seed=at + 7,
        boundaries=tuple(Boundary(mark, BoundaryKind.TURN) for mark in marks),
    )
    return Arrival(at, request, abort_at)


@dataclass
class Replies:
    """Everything that came of a traffic, by request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, RequestOutput] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[float]] = field(default_factory=dict)

    def take(self, output: RequestOutput) -> None:
        """One more part of a reply."""
        name = output.request_id
        self.tokens.setdefault(name, []).extend(output.token_ids)
        values = [item.logprob for item in output.logprobs or []]
        self.logprobs.setdefault(name, []).extend(values)
        if output.prompt_logprobs is not None:
            found = [item.logprob for item in output.prompt_logprobs if item is not None]
            self.prompt_logprobs[name] = found
        if output.is_finished:
            self.last[name] = output


def serve(
    engine: Engine, traffic: Sequence[Arrival], *, after_step: Callable[[], None] = lambda: None
) -> Replies:
    """Every request to its end."""
    replies, step, waiting = Replies(), 0, list(traffic)
    while waiting or engine.has_work():
        for one in [w for w in waiting if w.at <= step]:
            assert engine.add(one.request) is None
            waiting.remove(one)
        for one in traffic:
            if one.abort_at == step:
                engine.abort(one.request.request_id)
        for output in engine.step():
            replies.take(output)
        after_step()
        step += 1
    return replies


def compare(found: Replies, expected: Replies) -> None:
    """The same tokens and reasons, logprobs within rounding; a prefix where one was aborted."""
    assert found.tokens.keys() == expected.tokens.keys()
    for name, ids in expected.tokens.items():
        mine = found.tokens[name]
        if expected.last[name].finish_reason == "abort":
            size = min(len(mine), len(ids))
            assert mine[:size] == ids[:size], name
            continue
        assert mine == ids, name
        assert found.last[name].finish_reason == expected.last[name].finish_reason
        for values in ("logprobs", "prompt_logprobs"):
            a, b = (getattr(x, values).get(name, []) for x in (found, expected))
            assert len(a) == len(b)
            assert np.allclose(a, b, atol=2e-4), (name, values)


class Poisoner:
    """NaN in every slot as soon as it may be handed out again."""

    def __init__(self, cache: PrefixCache, runner: Any) -> None:
        _after_quarantine(cache.kv, lambda parts: runner.poison_kv(np.concatenate(parts).tolist()))
        _after_quarantine(cache.states, runner.poison_states)
        _before(cache.kv, "reclaim", lambda slots: runner.poison_kv(slots.tolist()))
        _before(cache.states, "reclaim", lambda slot: runner.poison_states([slot]))


def poison_all(runner: Any, config: EngineConfig) -> None:
    """NaN everywhere, the sinks included."""
    runner.poison_states(list(range(config.num_states + 1)))
    runner.poison_kv(list(range(config.num_kv_slots + 1)))
    launcher = getattr(runner, "launcher", None)  # the synchronous one has none
    log = launcher and launcher.log
    if log is not None:
        for tensor in log.buffers._tensors.values():
            with torch.inference_mode():
                tensor.fill_(POISON)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the runner has a stream of its own


def _after_quarantine(owner: Any, poison: Callable[[Any], None]) -> None:
    begin_step = owner.begin_step

    def wrapped() -> None:
        if owner._quarantine:
            poison(list(owner._quarantine))
        begin_step()

    owner.begin_step = wrapped


def _before(owner: Any, name: str, poison: Callable[[Any], None]) -> None:
    method = getattr(owner, name)

    def wrapped(slots: Any) -> None:
        if np.size(slots):
            poison(slots)
        method(slots)

    setattr(owner, name, wrapped)
