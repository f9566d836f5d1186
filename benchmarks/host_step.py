"""What the host does for a step of N decoding rows, behind a device that takes no time.

    PYTHONPATH=src python benchmarks/host_step.py --rows 256

The real scheduler, cache, planner and detokeniser (of the demo model); tokens are random. Prints
the median and mean milliseconds of each part of a step, as ``engine/step_times.py`` names them:
launches are left out, so ``submit`` is planning and staging alone. Needs Triton, no device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from hyradix.config import EngineConfig  # noqa: E402
from hyradix.engine.demo import demo_directory  # noqa: E402
from hyradix.engine.engine import Engine  # noqa: E402
from hyradix.request import Request, SamplingParams, ScheduledBatch, StepOutput  # noqa: E402
from hyradix.runner.decode_form import DecodeForm  # noqa: E402
from hyradix.runner.device_batch import Planner, StepPlan  # noqa: E402
from hyradix.runner.device_tables import DeviceTables  # noqa: E402
from hyradix.runner.request_table import RequestTable  # noqa: E402
from hyradix.runner.staging import Staging  # noqa: E402
from hyradix.text.tokenizer import Tokenizer  # noqa: E402
from tests.support.harness import make_config  # noqa: E402

PROMPT, OUTPUT, SKIPPED, STEPS = 1024, 256, 20, 150
IDS = (300, 3000)
"""Tokens with a text."""


class InstantRunner:
    """Plans and stages every step; what it samples is drawn at random."""

    def __init__(self, config: EngineConfig) -> None:
        device = torch.device("cpu")
        table, tables = RequestTable(config), DeviceTables(config, device)
        self._form = DecodeForm(config.max_requests, tables.sink_row, tables.sink_at)
        self._planner = Planner(table, tables, self._form, None)
        self._staging = Staging(device, len(self._form.numbers), 1 << 17)
        self._in_flight: deque[StepPlan] = deque()
        self._rng = np.random.default_rng(0)

    def submit(self, batch: ScheduledBatch) -> None:
        plan = self._planner.plan(batch)
        self._staging.send(self._form.numbers, list(plan.arrays.values()))
        self._in_flight.append(plan)

    def collect(self) -> StepOutput:
        plan = self._in_flight.popleft()
        count = len(plan.sampling)
        ones = np.ones(count, np.int32)
        return StepOutput(
            step=plan.batch.step,
            rows=plan.sampling_rows,
            token_ids=self._rng.integers(*IDS, (count, 1)).astype(np.int32),
            num_tokens=ones,
            is_faulty=np.zeros(count, np.bool_),
            paths=np.zeros((count, 1), np.int32),
            num_nodes=ones,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    rows = parser.parse_args().rows
    config = make_config(
        max_requests=rows, max_context=PROMPT + OUTPUT + 1, kv_slots=rows * (PROMPT + OUTPUT + 64),
        states=2 * rows, max_prefill_tokens=8192, overlap=True,
    )  # fmt: skip
    tokenizer = Tokenizer.from_dir(demo_directory())
    engine = Engine(config, InstantRunner(config), tokenizer, SimpleNamespace())
    rng = np.random.default_rng(1)
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    for i in range(rows):
        prompt = rng.integers(*IDS, PROMPT).astype("<i4").tobytes()
        engine.add(Request(request_id=str(i), prompt_token_ids=prompt, sampling=sampling, seed=i))
    while len(engine.step()) < rows:
        pass
    for _ in range(SKIPPED):
        engine.step()
    parts = defaultdict(list)
    for _ in range(STEPS):
        assert len(engine.step()) == rows
        for part, seconds in engine.times.seconds.items():
            parts[part].append(seconds * 1e3)
    for part, values in parts.items():
        print(f"{part:10} {statistics.median(values):7.3f} {statistics.mean(values):7.3f} ms")
    print(f"{'all':10} {sum(map(statistics.median, parts.values())):7.3f} "
          f"{sum(map(statistics.mean, parts.values())):7.3f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
