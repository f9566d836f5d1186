"""The mixer of Kimi delta attention over many tokens on the GPU: convolution, gates, chunks, norm.

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
from hyradix.kernels.kda.triton import DeviceKda, finish_, gates_
from hyradix.kernels.kda.triton_chunks import KdaChunkScratch, chunked_
from hyradix.kernels.triton_table import ChunkConfig


def mix_(
    projected: torch.Tensor,
    forget: torch.Tensor,
    gate: torch.Tensor,
    weights: DeviceKda,
    batch: DeviceStates,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    scratch: KdaChunkScratch,
    out: torch.Tensor,
    *,
    config: ChunkConfig | None = None,
) -> torch.Tensor:
    """Every sequence from its slot's state: out ``[T, H dv]``, slots and saves.

    Args as ``reference.mix``, on the device; tokens of no sequence stand at the end of projected,
    forget, gate and out, and are left out.
    """
    tokens, x = batch.sequences.shape[0], scratch
    conv_ragged_(projected, weights.conv, None, batch, conv_state, x.mixed)
    gates_(x.mixed[:tokens], projected, forget, weights, state, x.g, x.beta)
    chunked_(batch.chunks, state, scratch, projected.dtype, config=config)
    move_windows_(projected, batch, conv_state)
    finish_(x.o[:tokens], gate[:tokens], weights, out[:tokens])
    return out
