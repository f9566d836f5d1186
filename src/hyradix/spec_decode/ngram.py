"""Prompt lookup: what followed the last tokens when they stood earlier in the same row.

Owns: an index of token pairs for each row. Does not know: models, slots.

Invariants:
- Only tokens that will not change are indexed: those consumed, and the root. O(1) per token.
- Of the earlier places that end as the row does, those that agree for longest are used (up to
  ``MAX_MATCH`` tokens; at least two: single tokens rarely pay). What followed them forms a trie;
  children are ordered by how often they were found, then by how recently.
- A continuation that reaches the end of the row goes on with itself (the row may be repeating).
Read next: ``proposer.py``.
"""

from __future__ import annotations

from array import array

import torch

from hyradix.request import Int32Array
from hyradix.spec_config import ProposerName
from hyradix.spec_decode.drafts import Drafts
from hyradix.spec_decode.proposer import ConsumedTokens, DraftRound

MAX_MATCH = 4
"""Tokens that are compared; of places that agree for longer, all count alike."""
MAX_PLACES = 16
"""Earlier places that are looked at, the most recent first."""
KEEP = 0.8
"""Chance that a continuation goes on one token longer: weighs depth against breadth."""


class PairIndex:
    """The tokens of one row, and for each the last place before it where its pair stood.

    A place is the position of the pair's second token.
    """

    def __init__(self) -> None:
        self.token_ids = array("i")
        self._previous = array("i")
        self._latest: dict[int, int] = {}

    def extend(self, token_ids: list[int]) -> None:
        """Append tokens."""
        last = self.token_ids[-1] if self.token_ids else -1
        for place, token in enumerate(token_ids, start=len(self.token_ids)):
            key = (last << 32) | token
            self._previous.append(self._latest.get(key, -1))
            self._latest[key] = place
            last = token
        self.token_ids.extend(token_ids)

    def places(self) -> list[int]:
        """Earlier places that agree best with the end of the row, the most recent first."""
        ids, end = self.token_ids, len(self.token_ids) - 1
        found: list[int] = []
        longest = 2
        place = self._previous[end] if end > 0 else -1
        for _ in range(MAX_PLACES):
            if place <= 0:
                break
            length = 2
            while (
                length < MAX_MATCH and place >= length and ids[place - length] == ids[end - length]
            ):
                length += 1
            if length > longest:
                found, longest = [], length
            if length == longest:
                found.append(place)
            place = self._previous[place]
        return found


class Trie:
    """Continuations by their first tokens; node 0 is the root. Parents precede children."""

    def __init__(self, root: int) -> None:
        self.token_ids = [root]
        self.parents = [-1]
        self.counts = [0]
        self.depths = [0]
        self._children: dict[tuple[int, int], int] = {}

    def add(self, token_ids: list[int]) -> None:
        """One more continuation."""
        node = 0
        self.counts[0] += 1
        for token in token_ids:
            child = self._children.get((node, token))
            if child is None:
                child = self._children[node, token] = len(self.parents)
                self.token_ids.append(token)
                self.parents.append(node)
                self.counts.append(0)
                self.depths.append(self.depths[node] + 1)
            self.counts[child] += 1
            node = child

    def best(self, num_nodes: int, topk: int) -> tuple[list[int], list[int]]:
        """Token ids and parents of the best ``num_nodes``, each with ``topk`` children at most."""
        scores = [n * KEEP**depth for n, depth in zip(self.counts, self.depths, strict=True)]
        kept: dict[int, int] = {}
        num_children: dict[int, int] = {}
        for node in sorted(range(len(scores)), key=lambda node: -scores[node]):
            parent = self.parents[node]
            if node and (parent not in kept or num_children.get(parent, 0) == topk):
                continue
            num_children[parent] = num_children.get(parent, 0) + 1
            kept[node] = len(kept)
            if len(kept) == num_nodes:
                break
        parents = [kept.get(self.parents[node], -1) for node in kept]
        return [self.token_ids[node] for node in kept], parents


class NgramProposer:
    """See ``proposer.Proposer``. Needs no weights.

    token_ids: ``int32[max_requests, width]``, the runner's table; only read.
    """

    name: ProposerName = "ngram"
    uses_hidden = False
    keeps_up = False
    num_draft_layers = 0

    def __init__(self, token_ids: Int32Array) -> None:
        self._token_ids = token_ids
        self._indexes: dict[int, PairIndex] = {}

    def enter(self, row: int, start: int, hidden: torch.Tensor | None) -> None:
        """Forget the row's tokens."""
        self._indexes.pop(row, None)

    def propose(self, batch: DraftRound) -> Drafts:
        """Cost: a few microseconds a row, whatever its length; once, that of indexing it."""
        shape = batch.shape
        columns = (batch.rows, batch.starts, batch.max_nodes, batch.max_depth)
        return Drafts.of(
            [
                self._tree(row, start, min(nodes, shape.nodes), min(depth, shape.steps), shape.topk)
                for row, start, nodes, depth in zip(*(x.tolist() for x in columns), strict=True)
            ]
        )

    def learn(self, step: ConsumedTokens) -> None:
        """Nothing: the table is read when drafts are asked for."""

    def pass_over(self, rows: Int32Array, slots: Int32Array) -> None:
        """Nothing is kept in slots."""

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def _tree(
        self, row: int, start: int, num_nodes: int, depth: int, topk: int
    ) -> tuple[list[int], list[int]]:
        index = self._indexes.setdefault(row, PairIndex())
        known = len(index.token_ids)
        index.extend(self._token_ids[row, known : start + 1].tolist())
        ids, end = index.token_ids, start
        places = index.places() if num_nodes > 1 and depth > 0 else []
        if not places:
            return [ids[end]], [-1]
        trie = Trie(ids[end])
        for place in places:
            follow = ids[place + 1 : place + 1 + depth].tolist()
            while len(follow) < depth:
                follow.append(follow[len(follow) - (end - place)])
            trie.add(follow)
        return trie.best(num_nodes, topk)
