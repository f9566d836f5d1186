"""The same steps by either runner, with the next tokens dictated, and the logits before each.

Since a teacher says what comes next, a near tie changes nothing behind it: every position's logits
can be compared with those of one cold forward over the whole text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from hyradix.models.decoder import Decoder
from hyradix.request import SamplingParams, StateSave
from hyradix.runner.device_runner import DeviceRunner
from tests.runner.device.served import poison_all
from tests.support.player import GreedyResult, GreedySampler, Player

ROWS, LENGTH = 5, 128
LIMIT = 1e-4
"""In float32, of every position's error: largest difference over its largest logit."""
FACTORS, FLOORS = (1.6, 2.0), (0.004, 0.02)
"""In bfloat16, of half of the positions and of all: how much larger than the error of torch with
bfloat16 weights on the CPU, where what stands between products is float32."""
Logits = tuple[int, int, torch.Tensor]
"""Row, number of a token, and what comes behind it."""


class Teacher(GreedySampler):
    """Says what it was told to; ``logits`` are those that it was asked over: by row, then by the
    position of the token that comes next."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.texts = np.random.default_rng(5).integers(0, vocab_size, (ROWS, LENGTH), np.int32)
        self.logits: dict[int, dict[int, torch.Tensor]] = {row: {} for row in range(ROWS)}

    def sample(self, logits, rows, positions):
        for row, position, values in zip(rows.tolist(), positions.tolist(), logits, strict=True):
            self.logits[row][position] = values.float().cpu().clone()
        is_faulty = ~torch.isfinite(logits).all(1).cpu().numpy()
        return GreedyResult(self.texts[rows, positions], is_faulty, (None,) * len(rows))


class Taught(Player):
    """has_device_runner: steps as they are served on a GPU, graphs and all (or without them, all as
    mixed steps); else one at a time.

    Every slot holds NaN at first.
    """

    def __init__(
        self, model: Decoder, *, has_device_runner: bool, has_graphs: bool = True, **settings: Any
    ) -> None:
        self.teacher = Teacher(model.config.vocab_size)
        self._has_device_runner = has_device_runner
        self._has_graphs = has_graphs
        super().__init__(
            model, keep_logits=not has_device_runner, scatter=True,
            sampling=SamplingParams(temperature=0.0, logprobs=1), **settings,
        )  # fmt: skip
        poison_all(self.runner, self.config)

    @property
    def table(self) -> Any:
        return self.runner.launcher.table if self._has_device_runner else self.runner.table

    def make_runner(self) -> Any:
        if not self._has_device_runner:
            runner = super().make_runner()
            runner._sampler = self.teacher
            return runner
        runner = DeviceRunner(self.model, self.config, self.teacher, has_graphs=self._has_graphs)
        if self.model.ops.device.type == "cuda":
            runner.warm_up(lambda *_: None)
        for said in self.teacher.logits.values():
            said.clear()
        return runner

    def begin(self, count: int, **source: Any) -> int:
        """The next row, which knows ``count`` tokens of its text."""
        return self.add(self.teacher.texts[len(self.rows), :count].tolist(), **source)

    def run(self, *saves: StateSave, **counts: int) -> None:
        """A step, in which rows "r0", "r1" .. have so many tokens; one alone is decoded."""
        work = {int(name[1:]): count for name, count in counts.items()}
        alone = {row: (1, 1) for row, count in work.items() if count == 1}
        self.step(work, saves=saves, trees=alone)

    def found(self) -> Iterator[Logits]:
        """(Row, number of the token, logits behind it): of all tokens, or where it was sampled."""
        for row, known in self.rows.items():
            for position, logits in self.teacher.logits[row].items():
                yield row, position - 1, logits
            first = known.done - sum(len(part) for part in known.logits)
            for i, logits in enumerate(part for parts in known.logits for part in parts):
                yield row, first + i, logits.float().cpu()


def play(player: Taught, num_decodes: int) -> None:
    """Uneven chunks beside decodes, decodes of two and of three rows, states saved inside a chunk
    and while decoding, and rows that go on from them; a long chunk."""
    early, late = player.new_state(), player.new_state()
    player.begin(21)
    player.run(StateSave(0, early, 4), r0=7)
    player.begin(13)
    player.run(r0=9, r1=5)
    player.run(r0=5, r1=8)
    for _ in range(num_decodes // 2 - 1):
        player.run(r0=1, r1=1)
    depth = player.rows[0].done + 1
    player.run(StateSave(0, late, depth), r0=1, r1=1)
    for source, done, tail in ((early, 4, 9), (late, depth, 6)):
        row = len(player.rows)
        player.teacher.texts[row, :done] = player.teacher.texts[0, :done]
        player.begin(done + tail, source=source, done=done)
        player.share_kv(row, 0, done)
    player.run(r0=1, r2=7, r3=6, r1=1)
    player.run(r2=2, r0=1, r3=1)
    for _ in range(num_decodes - num_decodes // 2):
        player.run(r0=1, r2=1, r3=1)
    long, inside = player.begin(90), player.new_state()
    player.run(StateSave(long, inside, 37), r0=1, r4=60)  # more than a tile of matrix units holds
    player.run(r4=30)
    player.run(r0=1, r4=1)


def expected(model: Decoder, player: Taught) -> dict[int, torch.Tensor]:
    """Of every row, the logits ``[T, V]`` behind each token of its text, in one cold forward."""
    found = {}
    for row, known in player.rows.items():
        cold = Player(model, max_requests=1)
        cold.step({cold.add(known.tokens[: known.done]): known.done})
        found[row] = cold.logits_of(0).float()
    return found


def half_and_all(found: Iterable[Logits], cold: dict[int, torch.Tensor]) -> tuple[float, float]:
    """The median and the largest error; infinite where something is no number."""
    errors = []
    for row, at, logits in found:
        largest = float((logits - cold[row][at]).abs().max() / cold[row][at].abs().max())
        errors.append(largest if logits.isfinite().all() else math.inf)
    errors.sort()
    return errors[len(errors) // 2], errors[-1]
