"""Draft trees for the fake data plane: drawn at random, or exactly those that a test wants.

A tree is drawn as a shape and the nodes in it that are right; the tokens follow from the contents
of the row's slots (``look``), so that "right" means what the fake model will say itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from hyradix.spec_config import DraftShape

Look = Callable[[list[int]], int]
"""The true next token after a path of tokens from the root on."""

W6 = (-1, 0, 0, 0, 1, 1, 1, 2, 2, 2)
"""Nodes 4-6 continue node 1, 7-9 node 2."""


@dataclass(frozen=True)
class Plan:
    """A tree: ``parents`` (the root's is -1), and which of its nodes are right, root first."""

    parents: tuple[int, ...] = (-1,)
    right: tuple[int, ...] = (0,)

    def within(self, max_nodes: int, max_accepted: int) -> Plan:
        """Without the nodes that a round so small has no room for."""
        kept = [
            node
            for node in range(len(self.parents))
            if node < max_nodes and len(self.path(node)) <= max_accepted
        ]
        index = {node: at for at, node in enumerate(kept)}
        parents = tuple(index[self.parents[node]] if node else -1 for node in kept)
        return Plan(parents, tuple(index[node] for node in self.right if node in index))

    def path(self, node: int) -> list[int]:
        """The nodes from the root to ``node``."""
        above = [] if self.parents[node] < 0 else self.path(self.parents[node])
        return [*above, node]

    def tokens(self, root: int, look: Look, vocab_size: int, rng: Random) -> list[int]:
        """A token per node: what is right is what ``look`` says; siblings all differ."""
        tokens = [root]
        for node in range(1, len(self.parents)):
            above = [tokens[n] for n in self.path(self.parents[node])]
            truth = look(above)
            if node in self.right:
                tokens.append(truth)
                continue
            taken = {truth if self.parents[node] in self.right else -1}
            taken |= {tokens[n] for n in range(1, node) if self.parents[n] == self.parents[node]}
            first = rng.randrange(vocab_size)
            free = ((first + i) % vocab_size for i in range(vocab_size))
            tokens.append(next(token for token in free if token not in taken))
        return tokens


def chain(num_drafts: int, num_right: int) -> Plan:
    """A chain of drafts, the first ``num_right`` of which are right."""
    return Plan(tuple(range(-1, num_drafts)), tuple(range(num_right + 1)))


class RandomDrafts:
    """Any tree that the shape allows; sometimes none, sometimes all that there is room for."""

    def __init__(self, shape: DraftShape | None, rng: Random) -> None:
        self._shape = shape
        self._rng = rng

    def draw(self, max_nodes: int, max_accepted: int) -> Plan:
        """The plan of one row's round."""
        if self._shape is None or max_nodes <= 1:
            return Plan()
        rng, topk = self._rng, self._shape.topk
        wanted = rng.choice([1, max_nodes, max_nodes, rng.randint(1, max_nodes)])
        parents, depths = [-1], [0]
        while len(parents) < wanted:
            free = [
                n
                for n in range(len(parents))
                if depths[n] + 1 < max_accepted and parents.count(n) < topk
            ]
            if not free:
                break
            parent = rng.choice([free[-1], rng.choice(free)])
            parents.append(parent)
            depths.append(depths[parent] + 1)
        right, wrong_at = [0], rng.choice([0, 1, 2, 99, 99, rng.randint(0, max_accepted)])
        while len(right) <= wrong_at:
            children = [n for n, parent in enumerate(parents) if parent == right[-1]]
            if not children:
                break
            right.append(rng.choice([children[-1], rng.choice(children)]))
        return Plan(tuple(parents), tuple(right))


class GivenDrafts:
    """One plan after the other, then none."""

    def __init__(self, plans: Iterable[Plan]) -> None:
        self._plans = iter(plans)

    def draw(self, max_nodes: int, max_accepted: int) -> Plan:
        """See ``RandomDrafts``."""
        if max_nodes <= 1:
            return Plan()
        return next(self._plans, Plan()).within(max_nodes, max_accepted)
