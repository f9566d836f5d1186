"""Which drafts are possible: the shape of a draft tree, and the choices that do not fit together.

Owns: ``DraftShape``, ``SpecConfig`` and the refusals about drafts, each with the nearest choice
that is valid. Does not know: models, bytes, who proposes.
Source: DESIGN section 6. Read next: ``config.py``, ``state_bytes.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hyradix.errors import ConfigError
from hyradix.state_bytes import SpecShape, SpecStateMode

ProposerName = Literal["ngram", "mtp", "frozen_kv_mtp"]
PROPOSERS: tuple[ProposerName, ...] = ("ngram", "mtp", "frozen_kv_mtp")
DECODE_LOG = 16
"""Rows of a log where nothing else is said."""
MAX_NODES = 64
"""Nodes of the largest tree that is verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """``--spec-topk``, ``-steps``, ``-nodes`` (T, with the root)."""

    topk: int
    steps: int
    nodes: int

    @property
    def is_chain(self) -> bool:
        """No two nodes share a parent."""
        return self.topk == 1

    @property
    def max_accepted(self) -> int:
        """Positions that one round can consume: the root and ``steps`` drafts."""
        return self.steps + 1

    @property
    def beam_nodes(self) -> int:
        """Nodes that a beam can fill: topk children of the root, then topk^2 candidates a step."""
        return 1 + self.topk + (self.steps - 1) * self.topk**2

    @property
    def num_expanded(self) -> int:
        """Nodes that a beam expands: the root, then topk a step but for the last."""
        return 1 + self.topk * (self.steps - 1)

    def spec_shape(self, num_requests: int, num_log_rows: int) -> SpecShape:
        """For ``state_bytes``."""
        return SpecShape(
            num_requests=num_requests,
            num_nodes=self.nodes,
            num_log_rows=num_log_rows,
            max_accepted=self.max_accepted,
            is_chain=self.is_chain,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """Everything about drafts that is decided at start.

    is_automatic: the shape is the largest one allowed; each round may use a smaller one.
    """

    proposer: ProposerName
    state: SpecStateMode
    shape: DraftShape
    is_automatic: bool

    @property
    def num_slots(self) -> int:
        """KV slots that a row needs from the root's position on, for a round of full size.

        A verify writes one per node. ``mtp`` writes one per expanded node, and one for the token
        that is sampled behind the last accepted one.
        """
        shape = self.shape
        if self.proposer != "mtp":
            return shape.nodes
        return max(shape.nodes, shape.num_expanded, shape.max_accepted + 1)


def draft_shape(topk: int | None, steps: int | None, nodes: int | None) -> DraftShape | None:
    """Defaults filled in; None when nothing about the shape is given.

    topk: 1. nodes: all that topk and steps can fill, at most ``MAX_NODES``.
    Raises ``ConfigError`` for a combination that cannot be, with the nearest one that can.
    """
    if topk is None and steps is None and nodes is None:
        return None
    topk = 1 if topk is None else topk
    for name, value in (("topk", topk), ("steps", 1 if steps is None else steps)):
        if value < 1:
            raise refused(f"spec_{name}", value, "drafts need at least 1", 1)
    if topk >= MAX_NODES:
        reason = f"a round verifies at most {MAX_NODES} nodes"
        raise refused("spec_topk", topk, reason, MAX_NODES - 1)
    if steps is None:
        raise ConfigError(
            "drafts need --spec-steps, how deep they are; the nearest valid choice is "
            f"--spec-steps {_least_steps(topk, nodes or 0)}",
            param="spec_steps",
        )
    full = _most_nodes(topk, steps)
    deepest = steps + 1
    if deepest > MAX_NODES:
        reason = f"a round verifies at most {MAX_NODES} nodes"
        raise refused("spec_steps", steps, reason, MAX_NODES - 1)
    if nodes is None:
        widest = DraftShape(topk=topk, steps=steps, nodes=deepest)
        nodes = max(min(widest.beam_nodes, MAX_NODES), deepest)
    if nodes < deepest:
        reason = f"{steps} steps below the root are {deepest} nodes"
        raise refused("spec_nodes", nodes, reason, deepest)
    if nodes > min(full, MAX_NODES):
        reason = f"--spec-topk {topk} and --spec-steps {steps} give at most {full} nodes"
        if full > MAX_NODES:
            reason = f"a round verifies at most {MAX_NODES} nodes"
        raise refused("spec_nodes", nodes, reason, min(full, MAX_NODES))
    return DraftShape(topk=topk, steps=steps, nodes=nodes)


def _most_nodes(topk: int, steps: int) -> int:
    """Of a tree in which every node has ``topk`` children, ``MAX_NODES`` levels at most."""
    return sum(topk**depth for depth in range(min(steps, MAX_NODES) + 1))


def _least_steps(topk: int, nodes: int) -> int:
    """How deep a tree of so many nodes is at least."""
    nodes = min(nodes, MAX_NODES)
    return next(steps for steps in range(1, MAX_NODES) if _most_nodes(topk, steps) >= nodes)


def log_rows(decode_log: int | None, shape: DraftShape, *, rounds: int = 1) -> int:
    """R of mode ``log``: what was asked for, else ``DECODE_LOG`` or what must fit.

    ``rounds``: rounds whose rows may be there at once (two with overlap).
    Raises ``ConfigError`` for a log that is too short.
    """
    least = rounds * shape.max_accepted
    if decode_log is None:
        return max(DECODE_LOG, least)
    if decode_log < least:
        reason = f"the log must hold the {least} tokens that one round can accept"
        if rounds > 1:
            reason = f"with overlap the log must hold the {least} tokens of {rounds} rounds"
        raise refused("decode_log", decode_log, reason, least)
    return decode_log


def refused(name: str, value: object, reason: str, nearest: object) -> ConfigError:
    """The error for a choice that cannot be."""
    option = f"--{name.replace('_', '-')}"
    return ConfigError(
        f"{option} {value} is impossible: {reason}; the nearest valid choice is {option} {nearest}",
        param=name,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCosts:
    """Seconds that parts of a step take, measured at start for some numbers of rows.

    rows: ascending. plain: a step of so many decodes. node: every further node of a tree, all rows
    counted alike. draft: every step of the proposer. round: what a round with drafts adds whatever
    its size (keeping states, learning).
    """

    rows: tuple[int, ...]
    plain: tuple[float, ...]
    node: tuple[float, ...]
    draft: tuple[float, ...]
    round: tuple[float, ...]
