"""Engines on one model, the demo or any other, that share one set of weights."""

from __future__ import annotations

from pathlib import Path

from hyradix.config import DeviceFacts, Settings, resolve
from hyradix.engine.build import _info, build_engine
from hyradix.engine.engine import Engine
from hyradix.engine.model_source import find_model
from hyradix.models.decoder import Decoder
from hyradix.models.loader import load_model, model_facts
from hyradix.runner.background import BackgroundRunner
from hyradix.runner.runner import ModelRunner
from hyradix.sampling.sampler import Sampler
from hyradix.spec_config import ProposerName
from hyradix.text.tokenizer import Tokenizer


class Engines:
    """Loads the model once; ``make`` builds an engine with any settings on top of it."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, *, dtype: str = "float32") -> None:
        self.directory = directory
        self.dtype = dtype
        self.tokenizer = tokenizer
        self.facts = model_facts(directory, dtype, name="demo")
        self._models: dict[str | None, Decoder] = {}

    def model(self, proposer: ProposerName | None = None) -> Decoder:
        """The model, with the draft head of ``proposer``; loaded once each."""
        if proposer not in self._models:
            self._models[proposer] = load_model(self.directory, dtype=self.dtype, proposer=proposer)
        return self._models[proposer]

    def make(self, **options: object) -> Engine:
        """An engine; 16 Ki KV slots and 64 states unless told."""
        defaults: dict[str, object] = {"kv_slots": 16_384, "states": 64, "dtype": self.dtype}
        settings = Settings.from_options(**{**defaults, **options})
        config = resolve(
            settings, self.facts, DeviceFacts(kind="cpu", free_bytes=1 << 33, num_threads=2)
        )
        model = self.model(config.spec.proposer if config.spec is not None else None)
        sampler = Sampler(config.max_requests, config.vocab_size, config.eos_token_ids)
        runner = ModelRunner(model, config, sampler)
        info = _info(config, self.facts, self.directory, 0.0)
        steps = BackgroundRunner(runner.execute) if config.overlap else runner
        is_automatic = config.spec is not None and config.spec.is_automatic
        costs = runner.measure_costs() if is_automatic else None
        return Engine(config, steps, self.tokenizer, info, costs=costs)


class DemoEngines(Engines):
    """On the demo model, or a directory that has its own tokenizer."""

    def __init__(self, model: str = "demo", *, dtype: str = "float32") -> None:
        directory = find_model(model)
        super().__init__(directory, Tokenizer.from_dir(directory), dtype=dtype)


class BuiltEngines:
    """Engines as ``serve`` builds them, on any device: each loads the model and warms up anew."""

    def __init__(self, model: str = "demo", *, device: str, dtype: str = "float32") -> None:
        self._options: dict[str, object] = {"model": model, "device": device, "dtype": dtype}

    def make(self, **options: object) -> Engine:
        """An engine; 16 Ki KV slots and 64 states unless told."""
        defaults = {"kv_slots": 16_384, "states": 64, **self._options}
        chosen = {**defaults, **options}
        if chosen["device"] != "cpu" and chosen.get("max_prefill_tokens") == 0:
            del chosen["max_prefill_tokens"]  # a GPU's steps are bounded: its default is the most
        return build_engine(Settings.from_options(**chosen), lambda *_: None)
