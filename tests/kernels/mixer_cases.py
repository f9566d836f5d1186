"""The mixers of the three families as one thing to test: random weights, pools of NaN, a backend.

Each family also says what its mixer is by definition: written out in float64, from zero states.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyradix.kernels.compiled_ops import CompiledOps
from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates
from hyradix.kernels.kda.reference import KdaWeights
from hyradix.kernels.mamba2.reference import Mamba2Weights
from hyradix.kernels.torch_ops import TorchOps
from hyradix.kernels.tree_recurrence.chunked import naive
from hyradix.kernels.tree_recurrence.rules import GDN, KDA, MAMBA2, Inputs

BACKENDS = [CompiledOps(), TorchOps()]
backends = pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)


class Mixer:
    """Run by either backend on pools of its own.

    What a token brings is a list of arrays ``[T, sizes[i]]``; the last column of array
    ``decay_input`` goes into a decay. atol: of outputs, against other ways to compute them.
    """

    rule = GDN
    calls = ("pack_mixer", "mix", "mix_trees")
    decay_input = 0
    atol = 2e-5

    def __init__(self, shape, ops, num_slots, sizes, raw):
        self.hk, self.hv, self.dk, self.dv, self.width = shape
        self.channels = channels_of(shape)
        self.ops, self.sizes, self.raw = ops, sizes, raw
        pack, self._mix, self._mix_trees = (getattr(ops, name) for name in self.calls)
        self.weights = pack(raw)
        self.conv = torch.full((num_slots, self.width - 1, self.channels), float("nan"))
        self.state = torch.full((num_slots, self.hv, self.dk, self.dv), float("nan"))

    def clear(self, *slots):
        for slot in slots:
            self.conv[slot] = 0
            self.state[slot] = 0

    def inputs(self, tokens, seed=1):
        torch.manual_seed(seed)
        return [torch.randn(tokens, size) for size in self.sizes]

    def run(self, inputs, lengths, slots, saves=()):
        """saves: (sequence, count, slot), sorted."""
        offsets = np.zeros(len(slots) + 1, np.int32)
        for sequence, _, _ in saves:
            offsets[sequence + 1 :] += 1
        cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        batch = RaggedStates(
            cu,
            np.array(slots, np.int32),
            offsets,
            np.array([s[1] for s in saves], np.int32),
            np.array([s[2] for s in saves], np.int32),
        )
        view = self.ops.view
        arrays = [view(x) for x in inputs]
        out = self._mix(*arrays, self.weights, batch, view(self.conv), view(self.state))
        return self.ops.tensor(out)

    def run_trees(self, inputs, ragged, spec):
        """Outputs of all tokens, NaN where ``mix_trees`` wrote nothing."""
        view = self.ops.view
        out = torch.full((len(inputs[0]), self.hv * self.dv), float("nan"))
        arrays, pools = [view(x) for x in inputs], (view(self.conv), view(self.state))
        self._mix_trees(*arrays, self.weights, ragged, *pools, spec, view(out))
        return out

    def by_definition(self, inputs):
        """Outputs and the states after each token of one cold sequence, in float64."""
        inputs = [x.double() for x in inputs]
        columns = inputs[0][:, : self.channels]
        columns = torch.cat([columns.new_zeros(self.width - 1, self.channels), columns])
        windows = columns.unfold(0, self.width, 1)  # [T, C, K]
        bias = getattr(self.raw, "conv_bias", torch.zeros(self.channels))
        mixed = (windows * self.raw.conv.double()).sum(2) + bias.double()
        mixed = mixed * mixed.sigmoid()
        key_dim = self.hk * self.dk
        q, k, v = mixed.split([key_dim, key_dim, self.hv * self.dv], dim=1)
        q, k = (x.unflatten(1, (self.hk, self.dk)) for x in (q, k))
        if self.rule.has_delta:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            q = q / self.dk**0.5
        v = v.unflatten(1, (self.hv, self.dv))
        g, beta = self.gates(inputs)
        start = torch.zeros(self.hv, self.dk, self.dv, dtype=torch.float64)
        o, states = naive(self.rule, q, Inputs(k, v, g, beta), start)
        return self.finished(o, v, inputs).flatten(1), states


class GdnMixer(Mixer):
    """Shapes: Hk, Hv, dk, dv, K."""

    SHAPES = ((2, 6, 12, 20, 4), (1, 1, 33, 7, 2), (3, 3, 16, 48, 4), (4, 8, 64, 64, 4))

    def __init__(self, shape, ops, num_slots=12, *, decay=4.0):
        _, hv, _, dv, width = shape
        torch.manual_seed(0)
        channels = channels_of(shape)
        weights = MixerWeights(
            num_k_heads=shape[0],
            conv=torch.randn(channels, width),
            decay_rate=-torch.rand(hv) * decay,
            dt_bias=torch.randn(hv),
            norm=torch.randn(dv),
            eps=1e-6,
        )
        super().__init__(shape, ops, num_slots, [channels + hv * dv + 2 * hv], weights)

    def gates(self, inputs):
        b, a = inputs[0][:, -2 * self.hv :].split(self.hv, dim=1)
        dt = (1 + (a + self.raw.dt_bias).exp()).log()
        return (self.raw.decay_rate * dt).unsqueeze(2), 1 / (1 + (-b).exp())

    def finished(self, o, v, inputs):
        z = inputs[0][:, self.channels : -2 * self.hv].reshape(o.shape)
        return unit_mean(o, self.raw.eps) * self.raw.norm * z * z.sigmoid()


class KdaMixer(Mixer):
    """Shapes: H, dk, dv, K, lower bound of the decay."""

    rule = KDA
    calls = ("pack_kda", "mix_kda", "mix_kda_trees")
    decay_input = 1
    SHAPES = (
        (6, 12, 20, 4, None), (1, 33, 7, 2, -5.0), (3, 16, 48, 4, None), (8, 64, 64, 4, -5.0),
    )  # fmt: skip

    def __init__(self, shape, ops, num_slots=12):
        heads, dk, dv, width, lower_bound = shape
        torch.manual_seed(0)
        shape = (heads, heads, dk, dv, width)
        channels = channels_of(shape)
        weights = KdaWeights(
            num_heads=heads,
            conv=torch.randn(channels, width),
            rate=torch.rand(heads) * 4,
            dt_bias=torch.randn(heads * dk),
            norm=torch.randn(dv),
            eps=1e-6,
            lower_bound=lower_bound,
        )
        sizes = [channels + heads + 3, heads * dk, heads * dv]
        super().__init__(shape, ops, num_slots, sizes, weights)

    def gates(self, inputs):
        f = (inputs[1] + self.raw.dt_bias).unflatten(1, (self.hv, self.dk))
        rate, bound = self.raw.rate.double()[:, None], self.raw.lower_bound
        g = -rate * (1 + f.exp()).log() if bound is None else bound / (1 + (-rate * f).exp())
        return g, inputs[0][:, self.channels : self.channels + self.hv].sigmoid()

    def finished(self, o, v, inputs):
        return unit_mean(o, self.raw.eps).mul(self.raw.norm).flatten(1) * inputs[2].sigmoid()


class Mamba2Mixer(Mixer):
    """Shapes: Hk, Hv, dk, dv, K, groups of the norm."""

    rule = MAMBA2
    atol = 2e-4
    SHAPES = (
        (2, 6, 12, 20, 4, 1), (1, 1, 33, 7, 2, 1), (4, 8, 16, 64, 4, 4), (1, 5, 24, 80, 3, 5),
    )  # fmt: skip

    def __init__(self, shape, ops, num_slots=12, *, dt_limits=(0.05, 1.5)):
        *shape, groups = shape
        _, hv, _, dv, width = shape
        torch.manual_seed(0)
        channels = channels_of(shape)
        weights = Mamba2Weights(
            num_k_heads=shape[0],
            conv=torch.randn(channels, width) * 0.5,
            conv_bias=torch.randn(channels) * 0.5,
            decay_rate=-torch.rand(hv) * 4,
            dt_bias=torch.randn(hv),
            dt_limits=dt_limits,
            skip=torch.randn(hv),
            norm=torch.randn(hv * dv),
            num_norm_groups=groups,
            eps=1e-5,
        )
        super().__init__(shape, ops, num_slots, [channels + hv * dv + hv], weights)

    def gates(self, inputs):
        dt = F.softplus(inputs[0][:, -self.hv :] + self.raw.dt_bias).clamp(*self.raw.dt_limits)
        return (self.raw.decay_rate * dt).unsqueeze(2), dt

    def finished(self, o, v, inputs):
        z = inputs[0][:, self.channels : -self.hv]
        y = (o + self.raw.skip[:, None] * v).flatten(1) * F.silu(z)
        y = unit_mean(y.unflatten(1, (self.raw.num_norm_groups, -1)), self.raw.eps)
        return y.flatten(1) * self.raw.norm


def channels_of(shape):
    hk, hv, dk, dv = shape[:4]
    return 2 * hk * dk + hv * dv


def unit_mean(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def cut(inputs, piece):
    return [x[piece].contiguous() for x in inputs]


FAMILIES = (GdnMixer, KdaMixer, Mamba2Mixer)
CASES = [
    pytest.param(family, shape, id=f"{family.rule.name}-{'x'.join(map(str, shape))}")
    for family in FAMILIES
    for shape in family.SHAPES
]
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.rule.name)
cases = pytest.mark.parametrize(("family", "shape"), CASES)
