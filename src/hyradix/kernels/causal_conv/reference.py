"""Depthwise causal convolution with silu over a ragged batch, window kept by state slot (torch).

Owns: the readable convolution. Does not know: who owns a slot.
Invariant: the window holds the last K-1 RAW inputs, oldest first; zeros before the sequence.
Read next: ``../gated_delta_net/reference.py`` (the caller).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(convolution) of one sequence that goes on from ``window``.

    Args:
        x: ``[n, C]`` new inputs. weight: ``[C, K]``. window: ``[K-1, C]``. bias: ``[C]``.

    Returns: ``[n, C]``, and all raw inputs ``[K-1+n, C]``: the window after m tokens is
    ``inputs[m : m + K - 1]``.
    """
    inputs = torch.cat([window, x])  # [K-1+n, C]
    y = F.conv1d(inputs.T.unsqueeze(0), weight.unsqueeze(1), bias, groups=weight.shape[0])
    return F.silu(y.squeeze(0).T), inputs
