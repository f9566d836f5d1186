"""What only one family's mixer has: KDA's bounded decay and softplus, Mamba2's time step limits."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from hyradix.kernels.kda.compiled import softplus32
from hyradix.kernels.kda.reference import log_decay
from hyradix.kernels.torch_ops import TorchOps
from tests.kernels.mixer_cases import BACKENDS, KdaMixer, Mamba2Mixer


def test_softplus_of_compiled_kernels():
    x = np.concatenate([np.linspace(-86, 86, 3001), [-0.0, 0.0, 1e-8, 20.0, 20.1]])
    x = x.astype(np.float32)
    expected = F.softplus(torch.from_numpy(x).double(), threshold=100).numpy()
    ours = np.array([softplus32(value) for value in x])
    assert np.abs(ours / expected - 1).max() < 1e-6
    assert np.isnan(softplus32(np.float32("nan")))


def test_the_bounded_decay_stays_above_its_bound():
    weights = KdaMixer(KdaMixer.SHAPES[1], TorchOps()).raw
    g = log_decay(torch.randn(50, 33) * 100, weights)
    assert g.min() >= -5.0
    assert g.max() <= 0.0


def test_time_steps_without_limits():
    results = []
    for ops in BACKENDS:
        mixer = Mamba2Mixer(Mamba2Mixer.SHAPES[0], ops, dt_limits=(0.0, math.inf))
        mixer.clear(1)
        (x,) = mixer.inputs(20)
        x[:, -mixer.hv :] *= 30  # beyond where softplus is linear
        results.append(mixer.run([x], [20], [1]))
    assert torch.allclose(*results, atol=2e-4)
