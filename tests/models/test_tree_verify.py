"""A verify of a draft tree gives every node the logits of its path run plainly: all families.

One row, eight random trees one after the other, so that each starts from the state that the
acceptance of the one before has left; in each way to keep states.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.models.loader import load_model
from hyradix.state_bytes import MODES
from tests.kernels.tree_recurrence.cases import tree_of
from tests.support.player import Player

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4
VOCAB, PROMPT, NODES, STEPS = 97, 13, 20, 7
KINDS = ("random", "beam", "random", "wide", "chain", "random", "star", "beam")


class TreePlayer(Player):
    """A player whose row 0 is given its drafts."""

    def verify(self, token_ids: list[int], parents: list[int]) -> tuple[torch.Tensor, int]:
        """Logits of every node, and how many nodes were consumed."""
        proposer = self.runner.speculation.proposer
        proposer._tree = lambda *_: (token_ids, parents)
        self._of_nodes: torch.Tensor | None = None
        out = self.step({0: 1}, trees={0: (NODES, STEPS + 1)})
        assert out.num_nodes.tolist() == [len(parents)]
        return self._of_nodes, int(out.num_tokens[0])

    def _keep(self, batch, hidden):
        self._of_nodes = self.model.logits(hidden).clone()


class Plain:
    """Sequences run from nothing, without drafts; remembered."""

    def __init__(self, model) -> None:
        self.model = model
        self._known: dict[tuple[int, ...], torch.Tensor] = {}
        player = self.prefilled([prompt()])
        for _ in range(STEPS * len(KINDS) + 30):
            player.step({0: 1})
        self.greedy = player.rows[0].tokens

    def prefilled(self, sequences: list[list[int]]) -> Player:
        player = Player(self.model, max_requests=len(sequences), kv_slots=4096, states=32)
        rows = [player.add(tokens) for tokens in sequences]
        player.step({row: len(player.rows[row].tokens) for row in rows})
        return player

    def at_nodes(self, history: list[int], tokens: list[int], parents: list[int]) -> torch.Tensor:
        """``[T, V]``, node by node: the path to each leaf behind ``history``, as one sequence."""
        paths = [path for node, path in enumerate(paths_of(parents)) if node not in parents]
        runs = [history + [tokens[node] for node in path] for path in paths]
        unknown = [run for run in runs if tuple(run) not in self._known]
        if unknown:
            player = self.prefilled(unknown)
            for row, run in enumerate(unknown):
                self._known[tuple(run)] = player.logits_of(row)[len(history) :]
        found = torch.full((len(parents), VOCAB), float("nan"))
        for path, run in zip(paths, runs, strict=True):
            found[path] = self._known[tuple(run)]
        return found


def prompt() -> list[int]:
    return np.random.default_rng(7).integers(0, VOCAB, PROMPT).tolist()


def paths_of(parents: list[int]) -> list[list[int]]:
    """Nodes from the root to each node."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if node else []), node])
    return paths


@pytest.fixture(scope="module", params=["compiled", "torch"])
def plain(request, reference):
    _, directory = reference
    return Plain(load_model(directory, backend=request.param))


@pytest.mark.parametrize("mode", MODES)
def test_eight_trees_one_after_the_other(plain, mode):
    player = TreePlayer(
        plain.model, scatter=True, max_requests=1, spec="ngram", spec_state=mode, spec_topk=4,
        spec_steps=STEPS, spec_nodes=NODES,
    )  # fmt: skip
    player.runner.poison_states(list(range(17)))
    player.runner.poison_kv(list(range(1025)))
    row = player.rows[player.add(prompt())]
    player.step({0: PROMPT})
    random, generator = np.random.default_rng(3), torch.Generator().manual_seed(3)
    consumed = []
    for kind in KINDS:
        parents = tree_of(kind, int(random.integers(8, NODES + 1)), generator)
        paths = paths_of(parents)
        tokens = [row.tokens[-1], *random.integers(0, VOCAB, len(parents) - 1).tolist()]
        right = paths[int(random.integers(len(paths) // 2, len(paths)))]
        for depth, node in enumerate(right[1 : 1 + int(random.integers(1, STEPS))]):
            tokens[node] = plain.greedy[len(row.tokens) + depth]
        history = row.tokens[:-1]
        logits, count = player.verify(tokens, parents)
        expected = plain.at_nodes(history, tokens, parents)
        assert float((logits - expected).abs().max()) <= TOLERANCE
        consumed.append(count)
    assert max(consumed) >= 3, "deep acceptance"
    assert sum(count > 1 for count in consumed) >= 4
    assert row.tokens == plain.greedy[: len(row.tokens)]
