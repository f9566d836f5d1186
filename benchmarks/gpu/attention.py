"""Checks and timings of attention over slots: decode, trees, prefill, latent rows, writes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.bench import BATCHES, LIMITS, Bench, Call, Check, Checks
from hyradix.device_bytes import gathered_keys
from hyradix.kernels.attention.reference import AttentionWeights
from hyradix.kernels.attention.triton import (
    AttendScratch,
    DeviceQueries,
    attend,
    num_programs,
    query_blocks,
    tokens_per_block,
)
from hyradix.kernels.attention.triton_gather import (
    DeviceKeys,
    KeyScratch,
    gather,
    key_layout,
)
from hyradix.kernels.attention.triton_write import write_kv
from hyradix.kernels.rms_norm.reference import rms_norm
from hyradix.kernels.rotary.reference import apply_rotary, rotary_table
from hyradix.kernels.triton_table import AttendConfig, attend_config
from tests.kernels.triton_kernels.attention_cases import AttentionCase
from tests.kernels.triton_kernels.cases import NAN, error

BFLOAT16 = torch.bfloat16
CONTEXT = 1152
"""Halfway through 256 new tokens behind 1,024."""
CONTEXTS = (CONTEXT, 4_096, 32_000)
MOST_KEYS = 1 << 21
"""Of a bench: 8.6 GB of K and V."""


@dataclass(frozen=True)
class Heads:
    """H, Hkv, D, Dv."""

    q: int
    kv: int
    dim: int
    v_dim: int

    @property
    def is_latent(self) -> bool:
        return self.dim != self.v_dim


B4 = Heads(16, 4, 256, 256)
LATENT = Heads(32, 1, 576, 512)
CHECKED = (B4, LATENT, Heads(6, 2, 80, 80), Heads(5, 5, 64, 64), Heads(32, 8, 128, 128))


def checks(device: torch.device) -> Iterator[Checks]:
    chain, bush = list(range(-1, 7)), [-1, 0, 0, 1, 2, 4, 4, 0, 3, 3, 8]
    rows: dict[str, tuple[list[int], list[int], list[list[int]] | None]] = {
        "decode": ([700, 63, 0, 64], [1, 1, 1, 1], None),
        "trees": ([333, 0], [8, 11], [chain, bush]),
        "prefill": ([0, 130, 17], [150, 40, 1], None),
    }
    for heads, dtype in itertools.product(CHECKED, LIMITS):
        label = f"{heads}, {str(dtype).removeprefix('torch.')}"
        sizes = (heads.q, heads.kv, heads.dim, heads.v_dim)
        for kind, given in rows.items():
            make = partial(AttentionCase, *sizes, *given, dtype, heads.is_latent)
            name = f"{kind}, {label}"
            yield Checks(name, partial(_check, name, make, kind != "prefill", device))
        if gathered_keys(heads.dim, dtype.itemsize) and not heads.is_latent:
            make = partial(AttentionCase, *sizes, *rows["prefill"], dtype)
            name = f"copied keys, {label}"
            yield Checks(name, partial(_check, name, make, False, device, is_gathered=True))
    for heads in (B4, Heads(6, 2, 80, 80)):
        yield Checks(f"write, {heads}", partial(_check_write, heads, device))


def benches(device: torch.device, *, tune: bool) -> Iterator[Bench]:
    for batch in BATCHES:
        for context in CONTEXTS if tune else CONTEXTS[:1]:
            if batch * context > MOST_KEYS:
                continue
            name = f"decode behind {context}"
            for config in (None, *_decode_candidates(batch, context, device, tune=tune)):
                yield _bench(name, B4, batch, context, 1, config, device)
        yield _bench_write(batch, device)
        yield _bench("decode latent", LATENT, batch, CONTEXT, 1, None, device)
    yield _bench("decode behind 32000", B4, 1, 32_000, 1, None, device)
    for batch in (1, 64):
        yield _bench("tree of 4", B4, batch, CONTEXT, 4, None, device)
    yield _bench("tree of 64", B4, 8, CONTEXT, 64, None, device)
    prefill: list[AttendConfig | None] = [None]
    if tune:
        prefill += [AttendConfig(64, 64, 1, 4, 2), AttendConfig(128, 32, 1, 8, 3)]
    for start, count in ((0, 8_192), (8_192, 8_192), (15_500, 512)):
        name = f"prefill {count} of {start + count}"
        for config in prefill:
            yield _bench(name, B4, 1, start, count, config, device, is_gathered=True)
            yield _bench(f"{name} by slots", B4, 1, start, count, config, device)


def _decode_candidates(
    batch: int, context: int, device: torch.device, *, tune: bool
) -> list[AttendConfig]:
    """Fewer and more parts than the table has, never more than blocks of keys."""
    if not tune:
        return []
    chosen = _config(B4, batch, 1, device)[0].splits
    parts = {max(1, min(128, context // 32, chosen * n // 2)) for n in (1, 2, 4, 8)}
    shapes = ((32, 4, 3), (32, 4, 5), (32, 2, 3), (64, 4, 3))
    return [AttendConfig(16, n, s, w, stages) for n, w, stages in shapes for s in sorted(parts)]


def _config(
    heads: Heads, rows: int, count: int, device: torch.device, *, is_gathered: bool = False
) -> tuple[AttendConfig, int]:
    """The table's choice, and tokens of a block."""
    group = heads.q // heads.kv
    in_block = group * min(count, 64)
    counts = np.full(rows, count, np.int32)
    config = attend_config(
        device, rows=in_block, programs=num_programs(counts, group, heads.kv),
        dim=heads.dim, itemsize=2, is_gathered=is_gathered,
    )  # fmt: skip
    return config, tokens_per_block(config, group)


def _check(
    name: str, make: Callable[[], AttentionCase], can_split: bool, device: torch.device, *,
    is_gathered: bool = False,
) -> Iterator[Check]:  # fmt: skip
    case = make()
    group = case.heads // case.kv_heads
    rows = group * (min(case.counts) if can_split else 256)
    config = attend_config(
        device, rows=rows, programs=len(case.starts) * case.kv_heads, dim=case.dim,
        itemsize=case.dtype.itemsize, is_gathered=is_gathered,
    )  # fmt: skip
    total = sum(case.counts)
    scratch = AttendScratch(64 * total, case.heads, case.v_dim, device)
    scratch.o.fill_(NAN)
    out = torch.full((total, case.heads * case.v_dim), NAN, dtype=case.dtype, device=device)
    k = case.k.to(device)
    v = k[..., : case.v_dim] if case.is_latent else case.v.to(device)
    scale, queries, places = case.dim**-0.5, case.queries(config, device), None
    if is_gathered:
        keys, room = case.keys(device)
        k, v = gather(queries, keys, k, v, room)
        places = keys.offsets
    attend(
        case.q.to(device), queries, k, v, scale, config, scratch, out, gate=case.gate.to(device),
        is_view=case.is_latent, places=places,
    )  # fmt: skip
    yield Check(name, error(out, case.expected(scale, has_gate=True)), LIMITS[case.dtype])


def _weights(heads: Heads, device: torch.device) -> AttentionWeights:
    norms = (torch.rand(heads.dim) + 0.5, torch.rand(heads.dim) + 0.5)
    angles = rotary_table(CONTEXT + 8, heads.dim // 4, 1e7)
    on_device = (x.to(device) for x in (*norms, angles))
    return AttentionWeights(heads.q, heads.kv, heads.dim, 1e-6, *on_device)


def _check_write(heads: Heads, device: torch.device) -> Iterator[Check]:
    weights = _weights(heads, device)
    x = torch.randn(5, 2 * (heads.q + heads.kv) * heads.dim).to(BFLOAT16)
    positions = torch.tensor([0, 1, 900, 3, 77], dtype=torch.int32)
    slots = torch.tensor([4, 0, 2, 6, 1], dtype=torch.int32)
    k, v = (torch.full((8, heads.kv, heads.dim), NAN, dtype=BFLOAT16, device=device) for _ in "kv")
    q = torch.full((5, heads.q, heads.dim), NAN, dtype=BFLOAT16, device=device)
    write_kv(x.to(device), weights, positions.to(device), slots.to(device), q, k, v)
    sizes = [n * heads.dim for n in (heads.q, heads.kv, heads.kv, heads.q)]
    parts = [part.unflatten(1, (-1, heads.dim)) for part in x.double().split(sizes, dim=1)]
    angles = weights.angles.cpu().double()[positions.long()]
    norms = (weights.q_norm.cpu().double(), weights.k_norm.cpu().double())
    turned = [
        apply_rotary(rms_norm(part, norm, 1e-6), angles)
        for part, norm in zip(parts[:2], norms, strict=True)
    ]
    written = slots.nonzero().flatten()
    where = slots[written].long()
    yield Check(f"write, {heads}: q", error(q, turned[0]), 1e-2)
    yield Check(f"write, {heads}: k", error(k.cpu()[where], turned[1][written]), 1e-2)
    same = torch.equal(v.cpu()[where].double(), parts[2][written])
    same &= bool(v[[0, 3, 5, 7]].isnan().all())
    yield Check(f"write, {heads}: v", 0.0 if same else 1.0, 0.0)


def _bench(
    name: str, heads: Heads, batch: int, start: int, count: int, config: AttendConfig | None,
    device: torch.device, *, is_gathered: bool = False,
) -> Bench:  # fmt: skip
    chosen, tokens = _config(heads, batch, count, device, is_gathered=is_gathered)
    if config is not None:
        chosen, tokens = config, tokens_per_block(config, heads.q // heads.kv)
    columns, total = start + count, batch * count
    is_tree = 1 < count <= 64

    def build(sets: int) -> list[Call]:
        slots = batch * columns + 1
        order = torch.randperm(slots - 1).int() + 1
        cu = np.arange(batch + 1, dtype=np.int32) * count
        path = torch.full((total,), -1, dtype=torch.int64)  # the mask is read, whatever it says
        queries = DeviceQueries(
            torch.from_numpy(cu).to(device),
            torch.arange(batch, dtype=torch.int32).to(device),
            torch.full((batch,), start, dtype=torch.int32).to(device),
            torch.from_numpy(query_blocks(cu, np.full(batch, start, np.int32), tokens)).to(device),
            order.reshape(batch, columns).to(device),
            path.to(device) if is_tree else None,
        )
        scratch = AttendScratch(chosen.splits * total, heads.q, heads.v_dim, device)
        out = torch.empty(total, heads.q * heads.v_dim, dtype=BFLOAT16, device=device)
        gate = torch.randn_like(out)
        layout = key_layout(np.full(batch, columns, np.int32))
        keys = DeviceKeys(*(torch.from_numpy(x).to(device) for x in layout))
        room = KeyScratch(batch * columns * is_gathered, heads.kv, heads.dim, BFLOAT16, device)

        def call() -> Call:
            shape = (slots, heads.kv, heads.dim)
            k = torch.randn(*shape, device=device, dtype=BFLOAT16)
            v = k[..., : heads.v_dim] if heads.is_latent else torch.randn_like(k)
            q = torch.randn(total, heads.q, heads.dim, device=device, dtype=BFLOAT16)
            arguments = heads.dim**-0.5, chosen, scratch, out

            def gathered() -> None:
                copied = gather(queries, keys, k, v, room)
                attend(q, queries, *copied, *arguments, gate=gate, places=keys.offsets)

            if is_gathered:
                return gathered
            return lambda: attend(q, queries, k, v, *arguments, gate=gate, is_view=heads.is_latent)

        return [call() for _ in range(sets)]

    per_slot = heads.kv * (heads.dim if heads.is_latent else heads.dim + heads.v_dim) * 2
    num_bytes = batch * columns * per_slot + total * heads.q * (heads.dim + 2 * heads.v_dim) * 2
    pairs = batch * (count * start + count * (count + 1) / 2)
    flops = int(2 * pairs * heads.q * (heads.dim + heads.v_dim))
    return Bench(f"attention, {name}", batch, num_bytes, build, flops, str(chosen), config=config)


def _bench_write(batch: int, device: torch.device) -> Bench:
    heads = B4

    def build(sets: int) -> list[Call]:
        weights = _weights(heads, device)
        width = 2 * (heads.q + heads.kv) * heads.dim
        x = torch.randn(sets, batch, width, device=device, dtype=BFLOAT16)
        pools = torch.empty(2, sets, batch + 1, heads.kv, heads.dim, dtype=BFLOAT16, device=device)
        slots = torch.arange(1, batch + 1, dtype=torch.int32).to(device)
        q = torch.empty(batch, heads.q, heads.dim, dtype=BFLOAT16, device=device)

        def call(i: int) -> Call:
            return lambda: write_kv(x[i], weights, slots, slots, q, pools[0, i], pools[1, i])

        return [call(i) for i in range(sets)]

    num_bytes = batch * 2 * (2 * heads.q + 4 * heads.kv) * heads.dim
    return Bench("attention, norm, turn, write", batch, num_bytes, build)
