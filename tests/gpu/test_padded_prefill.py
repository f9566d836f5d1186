"""Little prefill padded to a size, graph and all, is what one mixed forward of the step is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hyradix.models.decoder import Decoder
from hyradix.request import StateSave
from hyradix.runner.device_prefill import PaddedPrefill
from tests.gpu.models import REAL, SMALL, Models
from tests.gpu.taught import LENGTH, Taught
from tests.kernels.triton_kernels.cases import error

pytestmark = pytest.mark.slow
LIMIT = 1e-4
"""In float32."""


def play(player: Taught, seed: int, num_steps: int) -> None:
    """Rows that come and prefill in chunks of any size, with states saved inside of them, while
    others decode; some go on from a state that was saved."""
    rng = np.random.default_rng(seed)
    saved: dict[int, tuple[int, int]] = {}  # row: slot, depth
    for _ in range(num_steps):
        known = len(player.rows)
        if known < 5 and (known == 0 or rng.random() < 0.5):
            if saved and rng.random() < 0.5:
                other = int(rng.choice(list(saved)))
                slot, done = saved[other]
                player.teacher.texts[known, :done] = player.teacher.texts[other, :done]
                player.begin(done + int(rng.integers(1, 40)), source=slot, done=done)
                player.share_kv(known, other, done)
            else:
                player.begin(int(rng.integers(1, 100)))
        work, saves = {}, []
        for row, state in player.rows.items():
            left = len(state.tokens) - state.done
            if left > 1 or state.done == 0 or row == len(player.rows) - 1 > known - 1:
                count = int(rng.integers(1, left + 1))
                if rng.random() < 0.4:
                    depth = state.done + int(rng.integers(1, count + 1))
                    slot = player.new_state()
                    saves.append(StateSave(row, slot, depth))
                    saved[row] = slot, depth
            elif rng.random() < 0.7 and len(state.tokens) < LENGTH:
                count = 1
            else:
                continue
            work[row] = count
        if work:
            run(player, work, saves)


def run(player: Taught, work: dict[int, int], saves: list[StateSave]) -> None:
    """Rows of one known token decode, others prefill."""
    rows = player.rows
    alone = {row: (1, 1) for row in work if len(rows[row].tokens) - rows[row].done == 1}
    player.step(work, saves=tuple(saves), trees={row: alone[row] for row in alone})


def memory(player: Taught) -> list[torch.Tensor]:
    pools = player.runner.pools
    used = np.sort(player._slots[: player._used]).tolist()
    kv = [x[:, used] for x in (pools.kv.k, pools.kv.v) if x.numel()]
    return [x.cpu() for x in (*kv, *(t[:, 1 : player._next_state] for t in pools.states.tensors))]


def compare(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, seed: int, num_steps: int, decode_log: int
) -> dict[str, int]:
    """Logits and memory of both ways. Returns: how many steps fitted, and how many did not."""
    fitted = {"fits": 0, "does not": 0, "beside decodes": 0}
    lay_out = PaddedPrefill.lay_out

    def watched(self: PaddedPrefill, plan: Any, planner: Any) -> int | None:
        size = lay_out(self, plan, planner)
        fitted["fits" if size else "does not"] += 1
        fitted["beside decodes"] += bool(size and plan.num_decodes)
        return size

    monkeypatch.setattr(PaddedPrefill, "lay_out", watched)
    players = []
    for has_graphs in (True, False):
        player = Taught(
            model, has_device_runner=True, has_graphs=has_graphs, max_requests=5, states=64,
            max_context=LENGTH + 8, kv_slots=1024, decode_log=decode_log,
        )  # fmt: skip
        play(player, seed, num_steps)
        players.append(player)
    monkeypatch.undo()
    ours, twin = players
    for row, said in twin.teacher.logits.items():
        assert ours.teacher.logits[row].keys() == said.keys()
        for position, logits in said.items():
            assert error(ours.teacher.logits[row][position], logits) < LIMIT, (row, position)
    for found, expected in zip(memory(ours), memory(twin), strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        assert error(found.nan_to_num(), expected.nan_to_num()) < LIMIT
    return fitted


CASES = [pytest.param("cpu", "small", name) for name in SMALL]
for kind, names in (("small", SMALL), ("real", REAL)):
    CASES += [pytest.param("cuda", kind, name, marks=pytest.mark.gpu) for name in names]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("device", "kind", "name"), CASES, indirect=["device"])
def test_padded_steps_are_mixed_steps(
    models: Models, device: torch.device, monkeypatch, kind: str, name: str, seed: int
) -> None:
    model = models.load(kind, name, "triton", str(device), "float32")
    num_steps = 12 if device.type == "cpu" else 40
    fitted = compare(model, monkeypatch, seed, num_steps, decode_log=4 * (seed % 2))
    assert fitted["fits"] > 3
    assert fitted["beside decodes"]
