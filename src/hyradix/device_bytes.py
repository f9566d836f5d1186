"""What a GPU's memory holds beside both pools and the log: the formula, before and after loading.

Owns: the bytes of scratch, tables, activations and graphs (and which sizes are captured). The
planner (``hyradix memory --device cuda``) and the engine's start use the same sums; after loading,
what was measured takes the place of what was computed.
Does not know: torch, devices, how the pools divide what is left (``config.divide_pools``).

Invariants:
- ``table_bytes`` is exact, and so is ``scratch_bytes`` for gated delta nets (a test compares them
  with what is allocated; other families keep a little more or less); activations and graphs are
  bounds from above, their constants are stated here.
Read next: ``config.py``, ``engine/device.py`` (what is free).
"""

from __future__ import annotations

from dataclasses import dataclass

from hyradix.state_bytes import RecurrentShape

MIB = 1 << 20
CONTEXT_BYTES = 700 * MIB
"""The CUDA context, modules of compiled kernels and libraries' workspaces."""
GRAPH_BYTES = 6 * MIB
"""What the driver keeps of one captured graph of some hundred launches."""
MARGIN_BYTES = 768 * MIB
MARGIN_PART = 0.1
"""Of activations: the allocator's blocks are larger than what is asked for (on an H200, under load,
0.9 GB of blocks that nothing was in)."""
CHUNK = 64
"""Tokens of a chunk of prefill: each keeps a row of products this long."""
LEAST_PARTS = 1024
"""(token, split) pairs that attention has scratch for, at least: more than rows of one token each
make, whatever their number (a test asserts it)."""
GATHERED_KEYS = 32_768
"""Keys of one step that attention of long chunks may have copied to one place."""
PRODUCT_PARTS = 1 << 20
"""Numbers of the parts of split products (and a counter for each 256)."""
EXPERT_TOKENS = 4096
"""Tokens that a mixture of experts works on at a time."""
PREFILL_SIZES = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Tokens of steps with prefill that are captured: of more the device takes longer than the host."""
PREFILL_ROWS = 8
"""Rows that prefill in such a step, at most."""
DRAW_ROWS = 32
"""Rows that are drawn from at a time, and bytes of a logit meanwhile (float64 weights, their sums
and a sort)."""
DRAW_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardShape:
    """What one token is inside a forward.

    key_heads: KV heads of ``v_dim`` numbers; 0: attention is to latent rows. widest: numbers that a
    layer's parts hold at once beside the residual and its norm: inputs of a mixer and its output,
    or an MLP's. expert_numbers, latent_numbers: in the scratch of experts and
    of latent attention.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    v_dim: int
    key_heads: int
    widest: int
    expert_numbers: int = 0
    latent_numbers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The largest step. table_width: columns of the KV table."""

    max_requests: int
    max_tokens: int
    max_context: int
    table_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BesidePools:
    """Bytes by what they are for. peak: activations of the largest step, logits included."""

    weights: int
    scratch: int
    tables: int
    peak: int
    graphs: int

    @property
    def total(self) -> int:
        """All of them, before anything is loaded."""
        loaded = CONTEXT_BYTES + self.weights + self.scratch
        return loaded + self.still_to_come(self.peak)

    def still_to_come(self, peak: int) -> int:
        """Bytes that are not allocated yet once weights and scratch are. peak: as measured."""
        margin = MARGIN_BYTES + int(MARGIN_PART * peak)
        return self.tables + peak + self.graphs + margin


def ladder(max_rows: int) -> tuple[int, ...]:
    """Sizes of decode steps that are captured: 1, 2, 4, 8, then every 8 up to 64, then every 16;
    the last is ``max_rows`` itself."""
    sizes = {1, 2, 4, 8, *range(8, 65, 8), *range(64, max_rows + 1, 16), max_rows}
    return tuple(sorted(size for size in sizes if size <= max_rows))


def prefill_ladder(max_tokens: int) -> tuple[int, ...]:
    """Tokens of steps with prefill that are captured, where a step has up to ``max_tokens``."""
    return tuple(size for size in PREFILL_SIZES if size <= max_tokens)


def beside_pools(
    forward: ForwardShape,
    recurrent: RecurrentShape,
    step: StepSize,
    *,
    weight_bytes: int,
    element_bytes: int,
) -> BesidePools:
    """The sums for an engine without drafts."""
    token = (3 * forward.hidden_size + forward.widest) * element_bytes
    logits = step.max_requests * forward.vocab_size * 4
    drawing = min(step.max_requests, DRAW_ROWS) * forward.vocab_size * DRAW_BYTES
    return BesidePools(
        weights=weight_bytes,
        scratch=scratch_bytes(forward, recurrent, step, element_bytes),
        tables=table_bytes(forward, step),
        peak=step.max_tokens * token + logits + drawing,
        graphs=_graph_bytes(step, token),
    )


def _graph_bytes(step: StepSize, token: int) -> int:
    """Graphs share one pool: the largest step's activations, ``token`` bytes for each token."""
    decodes = ladder(step.max_requests)
    prefills = prefill_ladder(step.max_tokens - step.max_requests)
    most = max(decodes + prefills)
    return most * token + (len(decodes) + len(prefills)) * GRAPH_BYTES


def scratch_bytes(
    forward: ForwardShape, recurrent: RecurrentShape, step: StepSize, element_bytes: int
) -> int:
    """What kernels leave for each other: chunks, experts and latent queries by token, steps and
    parts of attention by row."""
    r = recurrent
    keys, values = r.num_k_heads * r.k_dim, r.num_v_heads * r.v_dim
    by_token = 2 * keys + 2 * values + r.num_v_heads * (2 + r.k_dim + CHUNK)
    if r.has_channel_decay:  # of keys, and the system of a chunk beside its products
        by_token += keys + r.num_v_heads * CHUNK
    by_row = 2 * keys + 3 * values + 2 * (r.num_k_heads + r.num_v_heads)
    parts = max(step.max_requests, LEAST_PARTS) * forward.num_heads * (forward.v_dim + 1)
    activations = min(step.max_tokens, EXPERT_TOKENS) * forward.expert_numbers
    activations += step.max_tokens * forward.latent_numbers
    num_gathered = gathered_keys(forward.v_dim, element_bytes)
    activations += 2 * num_gathered * forward.key_heads * forward.v_dim
    numbers = step.max_tokens * by_token + step.max_requests * by_row + parts
    numbers += PRODUCT_PARTS + PRODUCT_PARTS // 256
    return 4 * numbers + element_bytes * activations


def gathered_keys(dim: int, itemsize: int) -> int:
    """Keys of one step that long chunks may have copied to one place before they attend: none where
    tiles of heads of ``dim`` numbers of ``itemsize`` bytes are too large for that."""
    return GATHERED_KEYS if dim <= 256 and (itemsize <= 2 or dim <= 64) else 0


def table_bytes(forward: ForwardShape, step: StepSize) -> int:
    """Token and KV tables with their sink rows, and the logits of captured steps."""
    columns = step.max_context + 1 + step.table_width
    tables = (step.max_requests + 1) * columns
    rows = step.max_requests + min(step.max_requests, PREFILL_ROWS)
    return 4 * (tables + rows * forward.vocab_size)
