"""A thousand tokens by rounds of drafts, against one float64 run: what each mode drifts by (f)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.gated_delta_net import reference
from hyradix.kernels.gated_delta_net.reference import RaggedStates
from hyradix.kernels.torch_ops import TorchOps
from hyradix.state_bytes import MODES
from tests.kernels.mixer_cases import GdnMixer
from tests.kernels.tree_recurrence.cases import error, tree_of
from tests.spec_decode.rounds import LAYERS, SHAPE, Rounds

NUM_TOKENS = 1000


def float64_states(rounds):
    """Recurrent states of all layers after the whole history of row 0."""
    mixer = GdnMixer(SHAPE, TorchOps(), decay=rounds.decay)
    weights = replace(
        mixer.weights,
        **{name: getattr(mixer.weights, name).double() for name in ("conv", "dt_bias", "norm")},
        decay_rate=mixer.weights.decay_rate.double(),
    )
    one, none = np.zeros(1, np.int32), np.zeros(0, np.int32)
    x = torch.stack([x for x, _ in rounds.history[0]]).double()
    batch = RaggedStates(np.array([0, len(x)], np.int32), one, np.zeros(2, np.int32), none, none)
    states = []
    for layer in range(LAYERS):
        conv = torch.zeros(1, *mixer.conv.shape[1:], dtype=torch.float64)
        state = torch.zeros(1, *mixer.state.shape[1:], dtype=torch.float64)
        reference.mix(x[:, layer].contiguous(), weights, batch, conv, state)
        states.append(state[0])
    return torch.stack(states)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ops", "decay"), [(CompiledOps(), 4.0), (CompiledOps(), 0.002), (TorchOps(), 0.002)]
)
@pytest.mark.parametrize("mode", MODES)
def test_a_thousand_tokens_drift_by_less_than_1e_5(ops, mode, decay, record_property):
    rounds = Rounds(mode, ops, num_log_rows=16, decay=decay)
    rounds.enter(0, 1)
    random, generator = np.random.default_rng(3), torch.Generator().manual_seed(3)
    while (left := NUM_TOKENS - len(rounds.history[0])) > 0:
        tree = tree_of("random", 4, generator) if random.integers(2) else [-1, 0, 1, 2]
        rounds.round({0: tree}, {0: int(random.integers(4)) if left >= 4 else 0})
    rounds.settle(0)
    drift = error(rounds.recurrent[:, 1], float64_states(rounds))
    record_property("drift", drift)
    print(f"{mode} {ops.name} decay {decay}: {drift:.1e} after {len(rounds.history[0])} tokens")
    assert drift <= 1e-5
