"""The gated delta rule in plain PyTorch: what training runs on, and the oracle of faster ones.

Owns: the recurrence. Does not know: projections, convolutions, layers.
Read next: `delta_kernels.py` (a faster one, where it can be had), `model.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

RESET_DECAY = -40.0  # log decay at a document's first token: e^-40 of the old state is nothing

DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def delta_rule_torch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, chunk: int = 64
) -> Tensor:
    """Gated delta rule in chunks, in float32: the slow twin of the kernel.

    Args: q, k [B, T, H, D], v [B, T, HV, D], g (log decay) and beta [B, T, HV]; q and k are
    l2-normalised here. Returns [B, T, HV, D] in v's dtype. Source: Gated Delta Networks (arXiv
    2412.06464), section 3.3.
    """
    dtype, (b, t, num_heads, d) = v.dtype, v.shape
    rep = num_heads // q.shape[2]
    q, k = (F.normalize(x.float(), dim=-1, eps=1e-6).repeat_interleave(rep, 2) for x in (q, k))
    pad = -t % chunk
    q, k, v = (F.pad(x.float(), (0, 0, 0, 0, 0, pad)) for x in (q, k, v))
    g, beta = (F.pad(x.float(), (0, 0, 0, pad)) for x in (g, beta))
    q, k, v = (x.view(b, -1, chunk, num_heads, d).permute(0, 3, 1, 2, 4) for x in (q, k, v))
    g, beta = (x.view(b, -1, chunk, num_heads).permute(0, 3, 1, 2) for x in (g, beta))
    q = q * d**-0.5
    total = g.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -math.inf).exp()
    system = (k @ k.transpose(-1, -2)) * decay * beta[..., None]
    weighted = torch.cat([v, k * total.exp()[..., None]], -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, weighted, upper=False, unitriangular=True)
    fresh, seen = solved.split(d, -1)
    scores = (q @ k.transpose(-1, -2)) * decay
    q_in = q * total.exp()[..., None]
    k_out = k * (total[..., -1:] - total).exp()[..., None]
    state = q.new_zeros(b, num_heads, d, d)
    outputs = []
    for c in range(q.shape[2]):
        new = fresh[:, :, c] - seen[:, :, c] @ state
        outputs.append(q_in[:, :, c] @ state + scores[:, :, c] @ new)
        state = (
            state * total[:, :, c, -1, None, None].exp() + k_out[:, :, c].transpose(-1, -2) @ new
        )
    out = torch.cat(outputs, 2)[:, :, :t]
    return out.transpose(1, 2).to(dtype)
