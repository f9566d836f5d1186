"""Random trees and inputs for the tests of the tree recurrence."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from hyradix.kernels.tree_recurrence.naive import naive
from hyradix.kernels.tree_recurrence.rules import Inputs, Rows, Rule
from hyradix.kernels.tree_recurrence.topology import PAD, Tree, chain_parents, describe

NAN = float("nan")
TOPOLOGIES = ("single", "chain", "star", "wide", "random", "beam")


def tree_of(kind: str, num_nodes: int, generator: torch.Generator) -> list[int]:
    """Parents of a tree of a kind; "single" has one node whatever is asked for."""

    def below(n: int) -> int:
        return int(torch.randint(n, (1,), generator=generator))

    if kind == "single":
        return [-1]
    if kind == "chain":
        return chain_parents(num_nodes)
    if kind == "star":
        return [-1] + [0] * (num_nodes - 1)
    if kind == "wide":
        return [-1] + [(i - 1) // 4 for i in range(1, num_nodes)]
    if (
        kind == "beam"
    ):  # level by level, two to five nodes each, parents anywhere on the level above
        parents, level = [-1], [0]
        while len(parents) < num_nodes:
            size = min(2 + below(4), num_nodes - len(parents))
            new = list(range(len(parents), len(parents) + size))
            parents += sorted(level[below(len(level))] for _ in new)
            level = new
        return parents
    return [-1] + [below(i) for i in range(1, num_nodes)]


@dataclass(frozen=True)
class Case:
    """A batch, NaN wherever nothing may be read."""

    rule: Rule
    base: torch.Tensor
    log: Rows
    num_log_rows: torch.Tensor
    q: torch.Tensor
    inputs: Inputs
    parents: list[list[int]]

    @property
    def tree(self) -> Tree:
        return describe(torch.tensor(self.parents, dtype=torch.int32))

    def to(self, dtype: torch.dtype) -> Case:
        return replace(
            self,
            base=self.base.to(dtype),
            log=Rows(*(x.to(dtype) for x in parts(self.log))),
            q=self.q.to(dtype),
            inputs=Inputs(*(x.to(dtype) for x in parts(self.inputs))),
        )

    def size(self, request: int) -> int:
        return sum(parent != PAD for parent in self.parents[request])

    def oracle(self, request: int, parents: list[int] | None = None, path: list[int] | None = None):
        """``naive`` of one request in float64; of the given nodes only, as a chain, with path."""
        case = self.to(torch.float64)
        nodes = list(range(self.size(request))) if path is None else path
        rows = int(self.num_log_rows[request])
        return naive(
            self.rule,
            case.base[request],
            Rows(*(x[request, :rows] for x in parts(case.log))),
            case.q[request, nodes],
            Inputs(*(x[request, nodes] for x in parts(case.inputs))),
            chain_parents(len(nodes)) if path is not None else self.parents[request][: len(nodes)],
        )


def parts(x: Rows | Inputs) -> list[torch.Tensor]:
    return [getattr(x, field.name) for field in fields(x)]


def make_case(
    rule: Rule,
    seed: int,
    *,
    parents: list[list[int]] | None = None,
    max_nodes: int = 24,
    max_rows: int = 8,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (8, 5),
    decay: str = "mixed",
    keys: str = "random",
) -> Case:
    """Float32 values (exact in float64 too). decay: mixed, strong, none; keys: random, repeated."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    if parents is None:
        parents = [
            tree_of(
                kind, int(torch.randint(1, max_nodes + 1, (1,), generator=generator)), generator
            )
            for kind in ("random", "beam", TOPOLOGIES[seed % len(TOPOLOGIES)])
        ]
        size = max(map(len, parents)) + seed % 3
        parents = [row + [PAD] * (size - len(row)) for row in parents]
    n, t, (hk, hv), (dk, dv) = len(parents), len(parents[0]), heads, dims
    width = dk if rule.has_channel_decay else 1

    def tokens(count: int) -> Inputs:
        k = normal(n, 1 if keys == "repeated" else count, hk, dk).expand(n, count, hk, dk)
        k = k / k.norm(dim=-1, keepdim=True)
        scale = {"mixed": 20 * uniform(n, count, 1, 1) ** 6, "strong": 20.0, "none": 0.0}[decay]
        g = -scale * uniform(n, count, hv, width)
        beta = uniform(n, count, hv) * 2
        special = torch.randint(6, (n, count, hv), generator=generator)
        for i, value in enumerate((0.0, 1.0, 2.0)):
            beta[special == i] = value
        return Inputs(k.contiguous(), normal(n, count, hv, dv), g, beta)

    inputs, logged = tokens(t), tokens(max_rows)
    log = Rows(logged.k, logged.v, logged.g)
    num_log_rows = torch.randint(max_rows + 1, (n,), generator=generator)
    q = normal(n, t, hk, dk) * dk**-0.5
    for request, row in enumerate(parents):
        for x in (q, *parts(inputs)):
            x[request, sum(p != PAD for p in row) :] = NAN
        for x in parts(log):
            x[request, num_log_rows[request] :] = NAN
    return Case(rule, normal(n, hv, dk, dv), log, num_log_rows, q, inputs, parents)


def error(ours: torch.Tensor, oracle: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    assert ours.isfinite().all()
    if not oracle.numel():
        return 0.0
    largest = float(oracle.abs().max())
    return float((ours.double() - oracle).abs().max()) / (largest or 1.0)


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Bit-equal, NaN where NaN."""
    return torch.equal(x.nan_to_num(7), y.nan_to_num(7))
