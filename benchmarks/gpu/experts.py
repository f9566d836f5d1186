"""Checks and timings of mixtures of experts and of latent attention, at the served models' shapes.

All sets of a bench share the weights and choose experts of their own. ``torch`` in the note: the
two products by ``grouped_mm`` (tokens gathered before, activation between), nothing summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu.attention import CONTEXT
from benchmarks.gpu.bench import BATCHES, Bench, Call, Check, Checks
from hyradix.kernels.activation.reference import Activation
from hyradix.kernels.activation.triton import activate
from hyradix.kernels.attention.triton import DeviceQueries, query_blocks, tokens_per_block
from hyradix.kernels.device_forms import DeviceTokens
from hyradix.kernels.mla.reference import LatentWeights
from hyradix.kernels.mla.triton import DeviceLatent, LatentScratch, latent_attention
from hyradix.kernels.moe import reference
from hyradix.kernels.moe.reference import ExpertWeights, Routes, Routing
from hyradix.kernels.moe.triton import DeviceExperts, ExpertScratch, experts, max_blocks
from hyradix.kernels.moe.triton_routing import DeviceRouting, group_pairs, route
from hyradix.kernels.triton_table import (
    ExpertConfig,
    ProductConfig,
    attend_config,
    expert_config,
)
from tests.kernels.triton_kernels.cases import NAN, error

BFLOAT16 = torch.bfloat16
PREFILL = 4_096


@dataclass(frozen=True)
class Mixture:
    """E experts of I, k for each token, H wide; how they are chosen."""

    name: str
    num_experts: int
    top_k: int
    width: int
    hidden: int
    activation: Activation = "swiglu"
    is_sigmoid: bool = False
    num_groups: int = 1
    top_groups: int = 1

    @property
    def routing(self) -> Routing:
        bias = torch.linspace(-0.1, 0.1, self.num_experts) if self.is_sigmoid else None
        return Routing(
            num_experts=self.num_experts, top_k=self.top_k, bias=bias, num_groups=self.num_groups,
            top_groups=self.top_groups, scoring="sigmoid" if self.is_sigmoid else "softmax",
            has_shared_gate=not self.is_sigmoid, scale=2.4,
        )  # fmt: skip

    @property
    def expert_bytes(self) -> int:
        """Both matrices of one expert, bfloat16."""
        return 2 * self.width * self.hidden * (3 if self.activation == "swiglu" else 2)

    def weights(self, device: torch.device, dtype: torch.dtype = BFLOAT16) -> DeviceExperts:
        rows = self.hidden * (2 if self.activation == "swiglu" else 1)
        shapes = (rows, self.width), (self.width, self.hidden)
        up, down = (
            torch.randn(self.num_experts, *shape, device=device, dtype=dtype) * shape[1] ** -0.5
            for shape in shapes
        )
        return DeviceExperts(up, down, self.activation)

    def ids(self, tokens: int, seed: int) -> torch.Tensor:
        """Different experts for each token, all as likely."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(tokens, self.num_experts, generator=generator)
        return noise.topk(self.top_k, dim=1).indices.int()

    def scratch(self, tokens: int, device: torch.device, dtype: torch.dtype) -> ExpertScratch:
        return ExpertScratch(
            tokens, self.top_k, self.num_experts, self.hidden, self.width, device, dtype
        )


QWEN35 = Mixture("qwen3.5 35B", 256, 8, 2_048, 512)
KIMI = Mixture("kimi 48B", 256, 8, 2_304, 1_024, is_sigmoid=True)
NEMOTRON = Mixture("nemotron 30B", 128, 6, 2_688, 1_856, "relu2", is_sigmoid=True)
MIXTURES = (
    QWEN35,
    Mixture("qwen3-next 80B", 512, 10, 2_048, 512),
    Mixture("granite tiny", 64, 6, 1_536, 512),
    Mixture("granite small", 72, 10, 4_096, 768),
    KIMI,
    NEMOTRON,
)
ODD = Mixture("odd", 37, 5, 331, 77, is_sigmoid=True)
GROUPS = Mixture("groups", 160, 6, 64, 32, is_sigmoid=True, num_groups=8, top_groups=3)
CHECKED = (
    (QWEN35, BFLOAT16, (1, 9, 300, 4_096)),
    (QWEN35, torch.float32, (9, 1_200)),
    (KIMI, BFLOAT16, (64,)),
    (NEMOTRON, BFLOAT16, (9, 4_096)),
    (ODD, BFLOAT16, (1, 300)),
    (ODD, torch.float32, (1, 300)),
)


def checks(device: torch.device) -> Iterator[Checks]:
    for dtype, limit in ((BFLOAT16, 1e-2), (torch.float32, 2e-3)):  # scores in tf32
        for rows in ([70, 1, 9], [1, 1, 1, 1]):
            name = f"latent attention, {rows}, {dtype}"
            yield Checks(name, partial(_check_latent, rows, name, dtype, limit, device))
    for mixture, dtype, counts in CHECKED:
        name = f"experts, {mixture.name}, {dtype}"
        yield Checks(name, partial(_check_mixture, mixture, dtype, counts, device))
    for mixture in (*MIXTURES, ODD, GROUPS):
        yield Checks(f"routing, {mixture.name}", partial(_check_routing, mixture, device))


def benches(device: torch.device, *, tune: bool) -> Iterator[Bench]:
    for mixture in MIXTURES:
        for batch in (*BATCHES, PREFILL):
            yield _bench_experts(mixture, batch, None, device)
        if hasattr(F, "grouped_mm"):
            yield _bench_torch(mixture, PREFILL, device)
    for batch in (1, 64, PREFILL):
        yield from _bench_routing(QWEN35, batch, device)
    for config, counts in _candidates() if tune else ():
        for batch in counts:
            yield _bench_experts(QWEN35, batch, config, device)
    for batch in BATCHES:
        yield _bench_latent(batch, CONTEXT, 1, device)
    yield _bench_latent(1, 0, PREFILL, device)
    yield _bench_latent(1, 15_500, 512, device)


def _candidates() -> Iterator[tuple[ExpertConfig, tuple[int, ...]]]:
    for n, k, warps, stages in ((16, 256, 4, 4), (32, 256, 4, 3), (64, 64, 4, 4), (32, 128, 2, 4)):
        part = ProductConfig(n, k, warps, stages)
        yield ExpertConfig(16, part, part), (1, 8, 64)
    for m, n, warps in ((32, 64, 4), (32, 128, 8), (64, 128, 4)):
        part = ProductConfig(n, 64, warps, 4)
        yield ExpertConfig(m, part, part), (256, PREFILL)
    for m, n in ((64, 128), (128, 64), (128, 128)):
        part, down = ProductConfig(n, 64, 8, 3), ProductConfig(2 * n, 64, 8, 3)
        yield ExpertConfig(m, part, down), (PREFILL,)


def _check_routing(mixture: Mixture, device: torch.device) -> Iterator[Check]:
    routing = mixture.routing
    generator = torch.Generator().manual_seed(0)
    width = mixture.num_experts + routing.has_shared_gate
    logits = torch.randn(70, width, generator=generator)
    expected = reference.route(logits.double(), routing)
    found = route(logits.to(device), DeviceRouting.of(routing, device))
    is_same = torch.equal(found.ids.cpu().long(), expected.ids)
    yield Check(f"routing, {mixture.name}: ids", 0.0 if is_same else 1.0, 0.0)
    yield Check(f"routing, {mixture.name}: weights", error(found.weights, expected.weights), 1e-5)
    if expected.shared is not None:
        yield Check(f"routing, {mixture.name}: gate", error(found.shared, expected.shared), 1e-5)


def _check_mixture(
    mixture: Mixture, dtype: torch.dtype, counts: tuple[int, ...], device: torch.device
) -> Iterator[Check]:
    weights = mixture.weights(device, dtype)
    for tokens in counts:
        yield _check_experts(mixture, weights, tokens, device)


def _check_experts(
    mixture: Mixture, weights: DeviceExperts, tokens: int, device: torch.device
) -> Check:
    """In turns where there are many; a fifth of the tokens goes to the same experts."""
    dtype = weights.up.dtype
    x, residual = (torch.randn(tokens, mixture.width, device=device, dtype=dtype) for _ in "xr")
    ids = mixture.ids(tokens, 1)
    ids[: tokens // 5] = ids[0]
    routes = Routes(ids.to(device), torch.rand(ids.shape, device=device), None)
    scratch = mixture.scratch(min(tokens, 3_000), device, dtype)
    for buffer in scratch.buffers:
        buffer.fill_(NAN if buffer.dtype == dtype else -1)
    found = experts(x, routes, weights, residual, scratch)
    wide = ExpertWeights(weights.up.double(), weights.down.double(), weights.activation)
    twin = Routes(routes.ids.long(), routes.weights.double(), None)
    expected = reference.experts(x.double(), twin, wide, residual.double())
    name = f"experts, {mixture.name}, {tokens} tokens, {dtype}"
    return Check(name, error(found, expected), 1e-2 if dtype == BFLOAT16 else 1e-5)


def _bench_experts(
    mixture: Mixture, batch: int, config: ExpertConfig | None, device: torch.device
) -> Bench:
    def build(sets: int) -> list[Call]:
        weights, scratch = mixture.weights(device), mixture.scratch(batch, device, BFLOAT16)

        def call(seed: int) -> Call:
            x = torch.randn(batch, mixture.width, device=device, dtype=BFLOAT16)
            shares = torch.rand(batch, mixture.top_k, device=device)
            routes = Routes(mixture.ids(batch, seed).to(device), shares, None)
            return lambda: experts(x, routes, weights, x, scratch, out=x, config=config)

        return [call(seed) for seed in range(sets)]

    note = "" if config is None else f"{config.block_m} {config.up} {config.down}"
    return _experts_bench(mixture, batch, build, note)


def _bench_torch(mixture: Mixture, batch: int, device: torch.device) -> Bench:
    def build(sets: int) -> list[Call]:
        if device.type == "meta":
            return [lambda: None]
        weights = mixture.weights(device)
        hidden = torch.empty(batch * mixture.top_k, mixture.hidden, device=device, dtype=BFLOAT16)

        def call(seed: int) -> Call:
            x = torch.randn(batch, mixture.width, device=device, dtype=BFLOAT16)
            flat = mixture.ids(batch, seed).flatten().to(device)
            order = flat.argsort(stable=True) // mixture.top_k
            ends = flat.bincount(minlength=mixture.num_experts).cumsum(0).int()

            def run() -> torch.Tensor:
                up = F.grouped_mm(x[order], weights.up.transpose(1, 2), offs=ends)
                activate(up, mixture.activation, hidden)
                return F.grouped_mm(hidden, weights.down.transpose(1, 2), offs=ends)

            return run

        return [call(seed) for seed in range(sets)]

    return _experts_bench(mixture, batch, build, "torch, nothing sorted or summed")


def _experts_bench(mixture: Mixture, batch: int, build: object, note: str) -> Bench:
    pairs, num_hit = batch * mixture.top_k, len(mixture.ids(batch, 0).unique())
    num_bytes = num_hit * mixture.expert_bytes + batch * mixture.width * 6
    num_bytes += pairs * 4 * (mixture.width + mixture.hidden)
    flops = pairs * mixture.expert_bytes  # two for each of its numbers
    return Bench(f"experts, {mixture.name}", batch, num_bytes, build, flops, note)  # type: ignore[arg-type]


def _bench_routing(mixture: Mixture, batch: int, device: torch.device) -> Iterator[Bench]:
    routing, pairs = DeviceRouting.of(mixture.routing, device), batch * mixture.top_k

    def build_route(sets: int) -> list[Call]:
        logits = torch.randn(sets, batch, mixture.num_experts + 1, device=device)

        def call(i: int) -> Call:
            return lambda: route(logits[i], routing)

        return [call(i) for i in range(sets)]

    def build_groups(sets: int) -> list[Call]:
        config = expert_config(device, pairs=pairs, num_experts=mixture.num_experts, itemsize=2)
        blocks = max_blocks(pairs, mixture.num_experts, config.block_m)
        shapes = ((pairs,), (pairs,), (mixture.num_experts + 1,), (blocks, 2))

        def call(seed: int) -> Call:
            ids = mixture.ids(batch, seed).to(device)
            arrays = [torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes]
            return lambda: group_pairs(ids, config.block_m, *arrays)

        return [call(seed) for seed in range(sets)]

    yield Bench("routing", batch, batch * 4 * mixture.num_experts + 8 * pairs, build_route)
    yield Bench("pairs by expert", batch, 12 * pairs, build_groups)


def _latent_weights() -> LatentWeights:
    return LatentWeights(
        num_shared=64, keys=torch.randn(32, 128, 512) * 128**-0.5,
        values=torch.randn(32, 128, 512) * 512**-0.5, norm=torch.rand(512) + 0.5, eps=1e-6,
    )  # fmt: skip


def _tokens(
    counts: list[int], starts: list[int], itemsize: int, device: torch.device
) -> DeviceTokens:
    """Rows one behind the other in the table, their slots in no order."""
    longest, rows = max(counts), len(counts)
    config = attend_config(
        device, rows=32 * longest, programs=sum(counts), dim=576, itemsize=itemsize,
    )  # fmt: skip
    columns = max(count + start for count, start in zip(counts, starts, strict=True))
    table = (torch.randperm(rows * columns).int() + 1).reshape(rows, columns)
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    own = np.arange(cu[-1]) - np.repeat(cu[:-1], counts)
    positions = torch.from_numpy((own + np.repeat(starts, counts)).astype(np.int32))
    slots = table[torch.from_numpy(np.repeat(np.arange(rows), counts)), positions.long()]
    blocks = query_blocks(cu, np.array(starts, np.int32), tokens_per_block(config, 32))
    queries = DeviceQueries(
        torch.from_numpy(cu).to(device), torch.arange(rows, dtype=torch.int32).to(device),
        torch.tensor(starts, dtype=torch.int32).to(device), torch.from_numpy(blocks).to(device),
        table.to(device),
    )  # fmt: skip
    return DeviceTokens.whole(positions.to(device), slots.to(device), queries, config)


def _check_latent(
    counts: list[int], name: str, dtype: torch.dtype, limit: float, device: torch.device
) -> Iterator[Check]:
    """Against keys and values written out, in float64."""
    starts = [65, 0, 130, 7][: len(counts)]
    raw, tokens = _latent_weights(), _tokens(counts, starts, dtype.itemsize, device)
    weights, total = DeviceLatent.of(raw, device, dtype), sum(counts)
    table = tokens.parts[0].queries.kv_table.cpu().long()
    pool = torch.full((table.numel() + 1, 1, 576), NAN)
    for row, start in enumerate(starts):
        pool[table[row, :start]] = torch.randn(start, 1, 576)
    pool = pool.to(device, dtype)
    x = torch.randn(total, 32 * 192 + 576).to(device, dtype)
    scratch = LatentScratch(total, 32, 512, 64, device, dtype)
    out = torch.full((total, 32 * 128), NAN, device=device, dtype=dtype)
    latent_attention(x, weights, tokens, pool, scratch, out)
    rows, expected, first = pool[:, 0].cpu().double(), [], 0
    q = x[:, : 32 * 192].cpu().double().unflatten(1, (32, 192))
    keys, values = (w.to(dtype).double() for w in (raw.keys, raw.values))
    for row, (count, start) in enumerate(zip(counts, starts, strict=True)):
        seen = rows[table[row, : start + count]]
        k = torch.cat([torch.einsum("hdr,nr->hnd", keys, seen[:, :512]),
                       seen[:, 512:].expand(32, -1, -1)], 2)  # fmt: skip
        v = torch.einsum("hvr,nr->hnv", values, seen[:, :512])
        scores = torch.einsum("thd,hnd->htn", q[first : first + count], k) * 192**-0.5
        hidden = torch.ones(count, start + count).triu(start + 1).bool()
        p = scores.masked_fill(hidden, -torch.inf).softmax(2)
        expected.append(torch.einsum("htn,hnv->thv", p, v).flatten(1))
        first += count
    yield Check(name, error(out, torch.cat(expected)), limit)


def _bench_latent(batch: int, start: int, count: int, device: torch.device) -> Bench:
    total, columns = batch * count, start + count

    def build(sets: int) -> list[Call]:
        tokens = _tokens([count] * batch, [start] * batch, 2, device)
        scratch = LatentScratch(total, 32, 512, 64, device, BFLOAT16)
        out = torch.empty(total, 32 * 128, device=device, dtype=BFLOAT16)

        def call() -> Call:
            weights = DeviceLatent.of(_latent_weights(), device, BFLOAT16)
            pool = torch.randn(batch * columns + 1, 1, 576, device=device, dtype=BFLOAT16)
            x = torch.randn(total, 32 * 192 + 576, device=device, dtype=BFLOAT16)
            return lambda: latent_attention(x, weights, tokens, pool, scratch, out)

        return [call() for _ in range(sets)]

    per_token = 2 * (32 * 192 + 576 + 32 * (2 * 576 + 2 * 512 + 128))
    num_bytes = 2 * batch * columns * 576 + total * per_token + 2 * 32 * 128 * 512 * 2
    pairs = batch * (count * start + count * (count + 1) / 2)
    flops = int(2 * pairs * 32 * (576 + 512)) + total * 4 * 32 * 128 * 512
    return Bench(f"latent attention, {count} of {columns}", batch, num_bytes, build, flops)
