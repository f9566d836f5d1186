"""Random weights, pools and batches for the tests and timings of the Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from hyradix.kernels.gated_delta_net.reference import MixerWeights, RaggedStates, mix
from hyradix.kernels.gated_delta_net.triton_parts import PackedMixer, StepScratch
from hyradix.kernels.tree_recurrence.layer_reference import columns_at
from hyradix.kernels.tree_recurrence.ragged import window_taps
from hyradix.kernels.tree_recurrence.rules import Rows
from hyradix.kernels.tree_recurrence.spec_layer import SpecLayer
from hyradix.kernels.tree_recurrence.state_log import folded

NAN = float("nan")


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN is an error."""
    ours, expected = ours.double().cpu(), expected.double().cpu()
    if not bool(ours.isfinite().all()):
        return float("inf")
    return float((ours - expected).norm() / expected.norm().clamp(min=1e-30))


@dataclass(frozen=True)
class MixerShape:
    """Hk, Hv, dk, dv, K."""

    hk: int
    hv: int
    dk: int
    dv: int
    width: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.hk * self.dk + self.hv * self.dv

    @property
    def projected(self) -> int:
        return self.channels + self.hv * self.dv + 2 * self.hv


@dataclass
class MixerCase:
    """One layer: pools with NaN wherever nobody may read, slots in no order, row 1 padding."""

    shape: MixerShape
    batch: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    num_log_rows: int = 4
    num_nodes: int = 0
    seed: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        s, n = self.shape, self.batch
        self.mixer = MixerWeights(
            num_k_heads=s.hk,
            conv=self.normal(s.channels, s.width) * 0.5,
            decay_rate=-self.uniform(s.hv) * 4,
            dt_bias=self.normal(s.hv),
            norm=self.normal(s.dv),
            eps=1e-6,
        )
        self.packed = PackedMixer.of(self.mixer, self.device)
        self.scratch = StepScratch(n, s.hk, s.hv, s.dk, s.dv, self.device)
        self.slots = torch.randperm(n, generator=self.generator).int() + 1
        if n > 2:
            self.slots[1] = 0
        self.conv = self.normal(n + 2, s.width - 1, s.channels).to(self.dtype)
        self.state = self.normal(n + 2, s.hv, s.dk, s.dv)
        for pool in (self.conv, self.state):
            pool[0] = NAN
            pool[n + 1] = NAN
        self.projected = self.normal(n, s.projected).to(self.dtype)
        self.log_rows = torch.randperm(n, generator=self.generator).int() + 1

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator)

    def log(self, counts: torch.Tensor) -> SpecLayer:
        """Arrays with ``counts`` valid rows per log row of the batch, NaN elsewhere."""
        s, rows = self.shape, self.num_log_rows + self.num_nodes
        k = self.normal(self.batch + 1, rows, s.hk, s.dk)
        k = k / k.norm(dim=-1, keepdim=True)
        u = self.normal(self.batch + 1, rows, s.hv, s.dv)
        g = -(self.uniform(self.batch + 1, rows, s.hv, 1) ** 4) * 8
        conv = self.normal(self.batch + 1, s.width - 1 + rows, s.channels)
        first = s.width - 1
        conv[:, :first] = NAN
        valid = dict(zip(self.log_rows.tolist(), counts.tolist(), strict=True))
        for row in range(self.batch + 1):
            for x in (k, u, g):
                x[row, valid.get(row, 0) :] = NAN
            conv[row, first + valid.get(row, 0) :] = NAN
        return SpecLayer(
            mode="log",
            conv=conv,
            first_node=first + self.num_log_rows,
            num_log_rows=self.num_log_rows,
            k=k,
            u=u,
            g=g,
        )


def log_to(log: SpecLayer, device: torch.device) -> SpecLayer:
    """Copies on the device."""
    k, u, g, conv = (x.to(device).clone() for x in (log.k, log.u, log.g, log.conv))
    return SpecLayer(
        mode="log",
        conv=conv,
        first_node=log.first_node,
        num_log_rows=log.num_log_rows,
        k=k,
        u=u,
        g=g,
    )


def wide(m: MixerWeights) -> MixerWeights:
    """The weights in float64."""
    conv, decay_rate, dt_bias, norm = (
        x.double() for x in (m.conv, m.decay_rate, m.dt_bias, m.norm)
    )
    return MixerWeights(m.num_k_heads, conv, decay_rate, dt_bias, norm, m.eps)


def mixed(case: MixerCase, conv: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """One token of each row that is no padding, in float64; zeros elsewhere."""
    real = case.slots.nonzero().flatten()
    n = len(real)
    none = np.zeros(0, np.int32)
    batch = RaggedStates(
        np.arange(n + 1, dtype=np.int32),
        case.slots[real].numpy(),
        np.zeros(n + 1, np.int32),
        none,
        none,
    )
    out = torch.zeros(case.batch, case.shape.hv * case.shape.dv, dtype=torch.float64)
    out[real] = mix(case.projected[real].double(), wide(case.mixer), batch, conv, state)
    return out


def folded_pools(
    case: MixerCase, log: SpecLayer, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows and states in float64, the rows' logs folded in."""
    conv, state = case.conv.double(), case.state.double()
    width = case.shape.width
    taps = torch.from_numpy(
        window_taps(counts.int().numpy(), width=width, first_row=width - 1)
    ).long()
    for n in range(case.batch):
        slot, row, count = int(case.slots[n]), int(case.log_rows[n]), int(counts[n])
        rows = Rows(*(x[row : row + 1, :count].double() for x in (log.k, log.u, log.g)))
        base = case.state[slot].double().unsqueeze(0)
        state[slot] = folded(base, rows, torch.tensor([count]))[0]
        conv[slot] = columns_at(case.conv[slot].double(), log.conv[row].double(), taps[n])
    return conv, state
