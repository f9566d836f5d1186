"""The mixer of Mamba2 over many tokens on the GPU: convolution, time steps, chunks, gated norm.

Owns: ``mix_``, the order of the launches. Does not know: projections, draft trees.

Invariants:
- Old windows are read by the first launch and replaced by the last but one.
- States and windows are exact at every save; only the named slots change (the sink never).
Read next: ``reference.py`` (the readable twin), ``triton_chunks.py``.
"""

from __future__ import annotations

import torch

from hyradix.kernels.causal_conv.triton_ragged import conv_ragged_, move_windows_
from hyradix.kernels.device_forms import DeviceStates
from hyradix.kernels.mamba2.triton import DeviceMamba2, finish_, time_steps_
from hyradix.kernels.mamba2.triton_chunks import Mamba2ChunkScratch, chunked_
from hyradix.kernels.triton_table import ChunkConfig


def mix_(
    projected: torch.Tensor,
    weights: DeviceMamba2,
    batch: DeviceStates,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    scratch: Mamba2ChunkScratch,
    out: torch.Tensor,
    *,
    config: ChunkConfig | None = None,
) -> torch.Tensor:
    """Every sequence from its slot's state: out ``[T, Hv dv]``, slots and saves.

    Args as ``reference.mix``, on the device; tokens of no sequence stand at the end of projected
    and out, and are left out.
    """
    tokens, x = batch.sequences.shape[0], scratch
    conv_ragged_(projected, weights.conv, weights.conv_bias, batch, conv_state, x.mixed)
    time_steps_(projected[:tokens], weights, state, x.g, x.dt)
    chunked_(batch.chunks, weights.num_k_heads, state, scratch, projected.dtype, config=config)
    move_windows_(projected, batch, conv_state)
    finish_(x.o[:tokens], x.mixed[:tokens], projected[:tokens], weights, out[:tokens])
    return out
