"""Chooses the gated delta rule used in training: the fla kernel if it passes a check, else PyTorch.

Owns: the self-test that compares a kernel with `delta_rule_torch`, forward and backward.
"""

from __future__ import annotations

import time

import torch
from delta_rule import RESET_DECAY, DeltaRule, delta_rule_torch
from torch import Tensor

MAX_ERROR = (
    0.06  # relative, of a bf16 kernel against float32: rounding stays well below, mistakes do not
)


def _random_inputs(device: str) -> list[Tensor]:
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    q, k, v = normal(2, 200, 4, 64), normal(2, 200, 4, 64), normal(2, 200, 8, 64)
    g, beta = (
        -torch.rand(2, 200, 8, device=device, generator=generator) * 0.3,
        normal(2, 200, 8).sigmoid(),
    )
    g[:, ::37] = RESET_DECAY  # documents that begin inside a chunk
    g[:, 100:130] = RESET_DECAY  # padding: documents of one token
    return [q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta]


def _run(rule: DeltaRule, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.to(dtype) if x.dtype is torch.bfloat16 else x.clone() for x in inputs]
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = rule(*leaves)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    (out.float() * weight).sum().backward()
    grads = [x.grad for x in leaves]
    grads[3] = torch.where(
        inputs[3] == RESET_DECAY, 0.0, grads[3]
    )  # training stops this gradient too
    return [out.detach().float(), *(g.float() for g in grads)]


def choose_delta_rule() -> DeltaRule:
    """The first candidate that agrees with the reference; prints what was tried."""
    if not torch.cuda.is_available():
        return delta_rule_torch
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception as error:
        print(f"kernels: fla is not usable ({error!r}); the PyTorch path is slower")
        return delta_rule_torch

    def grouped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    def repeated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        rep = v.shape[2] // q.shape[2]
        q, k = q.repeat_interleave(rep, 2), k.repeat_interleave(rep, 2)
        return grouped(q, k, v, g, beta)

    inputs = _random_inputs("cuda")
    expected = _run(delta_rule_torch, inputs, torch.float32)
    for rule in (grouped, repeated):
        try:
            start = time.perf_counter()
            got = _run(rule, inputs, torch.bfloat16)
            errors = [float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True)]
            print(
                f"kernels: fla {rule.__name__}: relative errors o,dq,dk,dv,dg,dbeta "
                f"{[f'{e:.4f}' for e in errors]}, {time.perf_counter() - start:.1f} s"
            )
            if max(errors) < MAX_ERROR:
                return rule
        except Exception as error:
            print(f"kernels: fla {rule.__name__} failed: {error!r}")
    print("kernels: falling back to the PyTorch path")
    return delta_rule_torch
