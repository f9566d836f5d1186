"""The optimizer: Muon for the hidden matrices, AdamW for everything else.

Owns: which parameter goes where, momentum, step. Source: Muon as in arXiv 2502.16982 (update
scaled to AdamW's size), Newton-Schulz iteration in bf16 over stacks of matrices of one shape.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5
MIN_MATRIX_SIDE = 64


def orthogonalize(stack: Tensor) -> Tensor:
    """Pushes the singular values of each matrix [S, m, n], m <= n, towards one; bf16 on GPUs."""
    a, b, c = NS_COEFFICIENTS
    x = stack.bfloat16() if stack.is_cuda else stack
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NS_STEPS):
        gram = x @ x.transpose(-2, -1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.to(stack.dtype)


class Muon:
    """Momentum and orthogonal updates for matrices, grouped by shape."""

    def __init__(
        self, parameters: list[nn.Parameter], *, lr: float, weight_decay: float, momentum: float
    ) -> None:
        self.lr, self.weight_decay, self.momentum = lr, weight_decay, momentum
        groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for p in parameters:
            groups.setdefault((p.shape[0], p.shape[1]), []).append(p)
        self.groups = list(groups.values())
        self.buffers = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grad = torch.stack([p.grad for p in group])
            buffer.lerp_(grad, 1 - self.momentum)
            update = grad.lerp(buffer, self.momentum)
            tall = update.shape[1] > update.shape[2]
            update = orthogonalize(update.mT.contiguous() if tall else update)
            update = update.mT if tall else update
            size = self.lr * 0.2 * max(update.shape[1:]) ** 0.5
            torch._foreach_mul_(group, 1 - self.lr * self.weight_decay)
            torch._foreach_add_(group, list(update.unbind(0)), alpha=-size)


class Optimizer:
    """Both optimizers behind one `step`; `scale` multiplies both learning rates."""

    def __init__(
        self, table: dict[str, nn.Parameter], *, lr: float, weight_decay: float = 0.1
    ) -> None:
        self.parameters = list(table.values())

        def is_hidden_matrix(name: str, p: nn.Parameter) -> bool:
            return p.ndim == 2 and min(p.shape) >= MIN_MATRIX_SIDE and "embed_tokens" not in name

        hidden = [p for n, p in table.items() if is_hidden_matrix(n, p)]
        rest = [p for n, p in table.items() if not is_hidden_matrix(n, p)]
        self.lr = lr
        self.muon = Muon(hidden, lr=lr, weight_decay=weight_decay, momentum=0.95)
        fused = rest[0].is_cuda
        self.adamw = torch.optim.AdamW(
            rest, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=fused
        )

    def step(self, scale: float) -> Tensor:
        """Clips, updates, clears gradients; returns the gradient norm before clipping (no sync)."""
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.muon.lr = self.lr * scale
        for group in self.adamw.param_groups:
            group["lr"] = self.lr * scale
        self.muon.step()
        self.adamw.step()
        for p in self.parameters:
            p.grad = None
        return norm
