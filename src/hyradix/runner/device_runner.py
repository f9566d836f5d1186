"""The data plane on a device: steps are launched when they are submitted, and waited for later.

Owns: the steps in flight, the stream that they run on, what comes up from them.
Does not know: the tree, the queue, drafts (``runner.py`` runs them, one step at a time).

Invariants:
- Steps run in the order they were submitted, on one stream; nothing is launched elsewhere.
- A step is planned from numbers that the host has: sampled tokens stay on the device, so planning
  step N+1 never waits for step N. The exceptions are rows that need the host to sample (penalties,
  biases, logprobs, pending min_tokens) and prompt logprobs.
- A row's result does not depend on the other rows beyond rounding; padding touches nothing alive.
Read next: ``device_batch.py``, ``device_launch.py``, ``graphs.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch

from hyradix.config import EngineConfig
from hyradix.kernels.triton_ahead import compiled_ahead
from hyradix.models.decoder import Decoder
from hyradix.request import Int32Array, ScheduledBatch, StepOutput
from hyradix.runner.device_batch import StepPlan
from hyradix.runner.device_launch import BeforeForward, Launched, Launcher, MadeUp
from hyradix.runner.device_rehearsal import rehearse, rehearse_largest
from hyradix.runner.pools import Pools
from hyradix.runner.staging import Pending
from hyradix.sampling.row_controls import RowControls
from hyradix.spec_decode.acceptance import TokenSampler

OnProgress = Callable[[str, int, int], None]


class DeviceRunner:
    """Implements ``hyradix.request.Runner`` for engines without drafts on ``TritonOps``.

    before_forward (tests): runs on the stream before every forward, to delay it.
    has_graphs: decodes and little prefill in padded steps, which on a GPU are captured; else all as
    mixed steps.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        sampler: TokenSampler,
        *,
        before_forward: BeforeForward | None = None,
        has_graphs: bool = True,
    ) -> None:
        assert config.spec is None, "drafts take the synchronous runner"
        self.config = config
        self._device = model.ops.device
        self._sampler = sampler
        self._controls = RowControls(config.max_requests)
        self._in_flight: deque[tuple[StepPlan, Launched]] = deque()
        self.stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        """All work of the runner; None on the CPU."""
        with torch.inference_mode(), self._on_stream():
            self.launcher = Launcher(model, config, sampler, before_forward, has_graphs)
        if self.stream is not None:  # weights were loaded on another stream
            torch.cuda.synchronize(self._device)

    @property
    def pools(self) -> Pools:
        """The memory behind slot numbers."""
        return self.launcher.pools

    # ---- the contract ---------------------------------------------------------------------------

    @torch.inference_mode()
    def submit(self, batch: ScheduledBatch, *, made_up: MadeUp | None = None) -> None:
        """Plan and launch a step. Waits only for what the module's docstring names."""
        with self._on_stream():
            plan = self.launcher.planner.plan(batch)
            self._init_rows(batch)
            rows, positions = plan.sampling_rows, plan.positions
            needs_host = self._controls.need_host(rows, positions)
            drawn = [] if needs_host else self._controls.draw(rows, positions)
            launched = self.launcher.launch(plan, drawn, needs_host=needs_host, made_up=made_up)
        self._in_flight.append((plan, launched))

    def collect(self) -> StepOutput:
        """Wait for the oldest step in flight."""
        plan, launched = self._in_flight.popleft()
        found = launched.found
        return _output(plan, launched, found.wait() if isinstance(found, Pending) else found)

    def execute(self, batch: ScheduledBatch, *, made_up: MadeUp | None = None) -> StepOutput:
        """Run one step and wait for it. Nothing else may be in flight."""
        assert not self._in_flight
        self.submit(batch, made_up=made_up)
        return self.collect()

    # ---- start ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def compile_ahead(self, on_progress: OnProgress) -> None:
        """Compile what ``warm_up`` and ``measure_peak`` launch, side by side. On a GPU alone.

        A second runner of the same model finds the kernels compiled, whatever its pools' sizes.
        """
        if self.stream is None:
            return
        report = partial(on_progress, "kernels")
        with self._on_stream(), compiled_ahead(report, self.config.num_threads) as is_ahead:
            if is_ahead:
                rehearse(self, lambda *_: None, is_device=True)
                self.launcher.rehearse_moves()
                self.launcher.rehearse_padded()
                self.wait()

    @torch.inference_mode()
    def warm_up(self, on_progress: OnProgress) -> None:
        """Compile every kernel, capture the graphs. Before the first request."""
        rehearse(
            self,
            lambda done, total: on_progress("kernels", done, total),
            is_device=self.stream is not None,
        )
        with self._on_stream():
            self.launcher.rehearse_moves()
            self.launcher.capture(lambda done, total: on_progress("graphs", done, total))
        self.wait()

    def measure_peak(self) -> int:
        """Bytes that the largest step needs beside what stays allocated. Before the first request.

        0 on the CPU, where nobody asks.
        """
        if self.stream is None:
            return 0
        rehearse_largest(self)  # what torch's libraries keep from their first call is no peak
        self.wait()
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        rehearse_largest(self)
        self.wait()
        return torch.cuda.max_memory_allocated(self._device) - before

    def wait(self) -> None:
        """Until everything launched has run."""
        if self.stream is not None:
            self.stream.synchronize()

    @torch.inference_mode()
    def poison_kv(self, slots: list[int]) -> None:
        """Fill KV slots with NaN (tests)."""
        with self._on_stream():
            self.pools.kv.poison(slots)

    @torch.inference_mode()
    def poison_states(self, slots: list[int]) -> None:
        """Fill state slots with NaN (tests)."""
        with self._on_stream():
            self.pools.states.poison(slots)

    # ---- parts ----------------------------------------------------------------------------------

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _init_rows(self, batch: ScheduledBatch) -> None:
        """Tell both samplers who entered, with the tokens that came in the same batch."""
        for init in batch.row_inits:
            ends = [u.start + len(u.values) for u in batch.token_updates if u.row == init.row]
            known = self.launcher.table.token_ids[init.row, : max(ends, default=0)].copy()
            self._sampler.init_row(
                init.row, init.sampling, init.seed, known, init.num_prompt_tokens
            )
            self._controls.init_row(init.row, init.sampling, init.seed, init.num_prompt_tokens)


def _output(plan: StepPlan, launched: Launched, found: Int32Array) -> StepOutput:
    count = len(plan.sampling)
    ones = np.ones(count, np.int32)
    return StepOutput(
        step=plan.batch.step,
        rows=plan.sampling_rows.astype(np.int32),
        token_ids=found[0].reshape(count, 1),
        num_tokens=ones,
        is_faulty=found[1].astype(np.bool_),
        paths=np.zeros((count, 1), np.int32),
        num_nodes=ones,
        logprobs=launched.logprobs or (None,) * count,
        prompt_logprobs=launched.prompts,
    )
