"""Engines on one model, the demo or any other, that share one set of weights."""

from __future__ import annotations

from pathlib import Path

import torch

from hyradix.config import DeviceFacts, EngineConfig, Settings, resolve
from hyradix.engine.build import _info
from hyradix.engine.engine import Engine
from hyradix.engine.model_source import find_model
from hyradix.engine.runners import is_asynchronous, make_device_runner
from hyradix.models.decoder import Decoder
from hyradix.models.loader import load_model, model_facts
from hyradix.request import Runner
from hyradix.runner.background import BackgroundRunner
from hyradix.runner.runner import ModelRunner
from hyradix.sampling.sampler import Sampler
from hyradix.spec_config import ProposerName, RoundCosts
from hyradix.text.tokenizer import Tokenizer


class Engines:
    """Loads the model once; ``make`` builds an engine with any settings on top of it.

    backend: of the kernels; Triton's run as ``serve`` runs them, on the CPU in the interpreter.
    """

    def __init__(
        self,
        directory: Path,
        tokenizer: Tokenizer,
        *,
        dtype: str = "float32",
        backend: str = "auto",
        device: str = "cpu",
    ) -> None:
        self.directory = directory
        self.dtype = dtype
        self.tokenizer = tokenizer
        self._placed = {"backend": backend, "device": device}
        has_type = backend == "triton" or device != "cpu"  # KV and windows follow the weights
        pools = "cuda" if has_type else "cpu"
        self.facts = model_facts(directory, dtype, device=pools, name="demo")
        self._models: dict[str | None, Decoder] = {}

    def model(self, proposer: ProposerName | None = None) -> Decoder:
        """The model, with the draft head of ``proposer``; loaded once each."""
        if proposer not in self._models:
            self._models[proposer] = load_model(
                self.directory, dtype=self.dtype, proposer=proposer, **self._placed
            )
        return self._models[proposer]

    def make(self, **options: object) -> Engine:
        """An engine; 16 Ki KV slots and 64 states unless told."""
        defaults: dict[str, object] = {"kv_slots": 16_384, "states": 64, "dtype": self.dtype}
        settings = Settings.from_options(**{**defaults, **options})
        config = resolve(
            settings, self.facts, DeviceFacts(kind="cpu", free_bytes=1 << 33, num_threads=2)
        )
        model = self.model(config.spec.proposer if config.spec is not None else None)
        info = _info(config, self.facts, self.directory, 0.0)
        runner, costs = self.start(model, config)
        return Engine(config, runner, self.tokenizer, info, costs=costs)

    def start(self, model: Decoder, config: EngineConfig) -> tuple[Runner, RoundCosts | None]:
        """What runs the steps, and what rounds of drafts cost where that is wanted."""
        if is_asynchronous(model, config):
            runner = make_device_runner(model, config)
            if model.ops.device.type == "cuda":
                runner.warm_up(lambda *_: None)
            return runner, None
        return start_synchronous(model, config)


def start_synchronous(model: Decoder, config: EngineConfig) -> tuple[Runner, RoundCosts | None]:
    """One step at a time, whatever the backend."""
    sampler = Sampler(config.max_requests, config.vocab_size, config.eos_token_ids)
    runner = ModelRunner(model, config, sampler)
    is_automatic = config.spec is not None and config.spec.is_automatic
    costs = runner.measure_costs() if is_automatic else None
    return BackgroundRunner(runner.execute) if config.overlap else runner, costs


def settle() -> None:
    """Between engines on one model: they share its scratch, but each has a stream of its own."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class DemoEngines(Engines):
    """On the demo model, or a directory that has its own tokenizer."""

    def __init__(self, model: str = "demo", **placed: str) -> None:
        directory = find_model(model)
        super().__init__(directory, Tokenizer.from_dir(directory), **placed)
