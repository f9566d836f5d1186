"""Which drafts are kept: the target's own token is sampled at every node, and its child followed.

Owns: the walk from a root to the last accepted node. Does not know: who proposed, states, KV.

Invariants:
- Every sampled token is the target's, drawn with the noise of (seed, position) and penalties over
  what precedes it on the path: the distribution is the target's exactly, and seeded output equals
  plain decode, whatever was proposed.
- A path never runs past its row's limit, past a token that ends the request, or into a node whose
  logits are not finite.
- A row without drafts is a root alone: plain decode and prefill go the same way.
Source: DESIGN section 6, acceptance. Read next: ``sampling/sampler.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hyradix.request import BoolArray, Int32Array, Int64Array, SamplingParams, TokenLogprobs


class SampleResult(Protocol):
    """What sampling M rows gives."""

    @property
    def token_ids(self) -> Int32Array: ...
    @property
    def is_faulty(self) -> BoolArray: ...
    @property
    def logprobs(self) -> tuple[TokenLogprobs | None, ...]: ...


class TokenSampler(Protocol):
    """What is needed of ``hyradix.sampling.sampler.Sampler``."""

    def init_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        token_ids: Int32Array,
        num_prompt_tokens: int,
    ) -> None:
        """A request enters ``row`` with all tokens known so far."""

    def sample(self, logits: torch.Tensor, rows: Int32Array, positions: Int64Array) -> SampleResult:
        """Choose a token per row of ``logits`` float32 ``[M, V]``."""

    def choose_plain(self, logits: torch.Tensor, rows: Int32Array) -> SampleResult | None:
        """The best of every row of ``logits``, if ``rows`` ask for nothing else."""

    def is_end(self, row: int, token_id: int, position: int) -> bool:
        """Whether ``token_id`` at ``position`` ends the request of ``row``."""

    def logprobs_of(
        self, logits: torch.Tensor, token_ids: Int32Array, num_top: int
    ) -> TokenLogprobs:
        """Log probabilities of given tokens, for prompts."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """M rows to sample for, each a tree.

    rows: ``int32[M]``. positions: ``int32[M]`` of the root: a token sampled at a node of depth d
    stands at position + d + 1. cu_nodes ``int32[M+1]``, parents, token_ids ``int32[total]``: the
    nodes, as in ``FlatTrees``. max_accepted: ``int32[M]`` nodes that a path may have.
    """

    rows: Int32Array
    positions: Int32Array
    cu_nodes: Int32Array
    parents: Int32Array
    token_ids: Int32Array
    max_accepted: Int32Array


@dataclass(frozen=True, slots=True)
class Accepted:
    """paths: nodes consumed, the root first. token_ids: as many, each the target's at that node.

    is_faulty: ``bool[M]``; such a row's path is its root alone and its token means nothing.
    """

    paths: list[list[int]]
    token_ids: list[list[int]]
    is_faulty: BoolArray
    logprobs: tuple[TokenLogprobs | None, ...]


def follow(sampler: TokenSampler, logits: torch.Tensor, candidates: Candidates) -> Accepted:
    """Walk every tree. logits: float32 ``[total, V]``, one row per node, in the trees' order.

    Cost: one call of the sampler per depth reached; one in all where only the best are wanted.
    """
    plain = sampler.choose_plain(logits, candidates.rows)
    first = candidates.cu_nodes[:-1].astype(np.int64)
    num_rows = len(candidates.rows)
    paths: list[list[int]] = [[0] for _ in range(num_rows)]
    tokens: list[list[int]] = [[] for _ in range(num_rows)]
    logprobs: list[list[TokenLogprobs | None]] = [[] for _ in range(num_rows)]
    is_faulty = np.zeros(num_rows, np.bool_)
    active = list(range(num_rows))
    for depth in range(int(candidates.max_accepted.max(initial=0))):
        nodes = first[active] + [paths[i][-1] for i in active]
        places = candidates.positions[active].astype(np.int64) + (depth + 1)
        if plain is None:
            at_all = len(nodes) == logits.shape[0] and depth == 0
            chosen = logits if at_all else logits[torch.from_numpy(nodes).to(logits.device)]
            result, at = sampler.sample(chosen, candidates.rows[active], places), range(len(nodes))
        else:
            result, at = plain, nodes.tolist()
        going = []
        for j, i, place in zip(at, active, places, strict=True):
            if result.is_faulty[j]:
                is_faulty[i] = depth == 0
                if depth:
                    paths[i].pop()  # its parent's token stands, the node itself is of no use
                else:
                    tokens[i].append(0)
                continue
            token = int(result.token_ids[j])
            tokens[i].append(token)
            logprobs[i].append(result.logprobs[j])
            if len(paths[i]) < candidates.max_accepted[i]:
                child = _child(candidates, i, paths[i][-1], token)
                if child and not sampler.is_end(int(candidates.rows[i]), token, int(place)):
                    paths[i].append(child)
                    going.append(i)
        if not going:
            break
        active = going
    return Accepted(paths, tokens, is_faulty, tuple(_joined(parts) for parts in logprobs))


def _child(candidates: Candidates, tree: int, node: int, token: int) -> int:
    """The child of ``node`` that proposes ``token``; 0 (the root is nobody's child) for none."""
    first, end = (int(at) for at in candidates.cu_nodes[tree : tree + 2])
    if end - first == 1:
        return 0
    is_child = candidates.parents[first:end] == node
    is_it = is_child & (candidates.token_ids[first:end] == token)
    return int(is_it.argmax())


def _joined(parts: list[TokenLogprobs | None]) -> TokenLogprobs | None:
    """Logprobs of one row's tokens, one after the other."""
    found = [part for part in parts if part is not None]
    if len(found) <= 1:
        return found[0] if found else None
    return TokenLogprobs(
        *(
            np.concatenate([getattr(part, name) for part in found])
            for name in ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")
        )
    )
