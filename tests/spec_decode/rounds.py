"""Rounds of drafts over a few recurrent layers without a model, beside plain decode of the same."""

from __future__ import annotations

import numpy as np
import torch

from hyradix.kernels.tree_recurrence.ragged import FlatTrees
from hyradix.kernels.tree_recurrence.rules import GDN
from hyradix.request import StateFold, StateSave
from hyradix.spec_decode.state_keeping import make_keeper
from hyradix.state_bytes import RecurrentShape, SpecShape
from tests.kernels.mixer_cases import GdnMixer
from tests.kernels.tree_recurrence.cases import NAN

SHAPE = (2, 6, 12, 20, 4)
LAYERS = 3
HIDDEN = 5
SLOTS = 24


class Rounds:
    """A keeper with its pools. Request row r works in slot r + 1; saves may use slots from 8 on.

    ``history[r]``: what r has consumed, as (projected ``[LAYERS, P]``, hidden ``[HIDDEN]``).
    """

    def __init__(
        self, mode, ops, *, num_requests=3, num_nodes=8, num_log_rows=9, max_accepted=4,
        is_chain=False, shape=SHAPE, decay=4.0,
    ):  # fmt: skip
        self.mode, self.ops, self.shape, self.decay = mode, ops, shape, decay
        self.mixer = GdnMixer(shape, ops, num_slots=1, decay=decay)
        hk, hv, dk, dv, width = shape
        channels = self.mixer.channels
        self.recurrent = torch.full((LAYERS, SLOTS, hv, dk, dv), NAN)
        self.conv = torch.full((LAYERS, SLOTS, width - 1, channels), NAN)
        self.hidden = torch.full((SLOTS, HIDDEN), NAN)
        self.recurrent_shape = RecurrentShape(
            num_layers=LAYERS, num_k_heads=hk, num_v_heads=hv, k_dim=dk, v_dim=dv,
            conv_channels=channels, conv_width=width, hidden_size=HIDDEN,
        )  # fmt: skip
        self.spec = SpecShape(
            num_requests=num_requests, num_nodes=num_nodes, num_log_rows=num_log_rows,
            max_accepted=max_accepted, is_chain=is_chain,
        )  # fmt: skip
        self.keeper = make_keeper(
            mode, ops, GDN, self.recurrent_shape, self.spec, self.recurrent, self.conv, self.hidden
        )
        self.history = {}
        self._decoded = {}
        self.generator = torch.Generator().manual_seed(1)

    @property
    def pools(self):
        return self.recurrent, self.conv, self.hidden

    def tokens(self, count):
        """Inputs ``[count, LAYERS, P]`` and hidden states of as many tokens."""
        width = self.mixer.channels + self.shape[1] * (self.shape[3] + 2)
        x = torch.randn(count, LAYERS, width, generator=self.generator)
        return x, torch.randn(count, HIDDEN, generator=self.generator)

    def enter(self, row, num_tokens):
        """A request whose first tokens are run by plain ``mix``."""
        self.keeper.enter(row)
        x, hidden = self.tokens(num_tokens)
        self.history[row] = list(zip(x, hidden, strict=True))
        state, window, last = self.plain(row, num_tokens)
        self.recurrent[:, row + 1], self.conv[:, row + 1] = state, window
        self.hidden[row + 1] = last

    def plain(self, row, depth, *, with_output=False):
        """(states, windows, hidden) after ``depth`` tokens of plain decode, one a step."""
        tokens, done = self.history[row], self._decoded.setdefault(row, [])
        while done and (len(done) > len(tokens) or done[-1][0] is not tokens[len(done) - 1]):
            done.pop()
        mixer = GdnMixer(self.shape, self.ops, num_slots=LAYERS, decay=self.decay)
        mixer.state.zero_()
        mixer.conv.zero_()
        if done:
            mixer.state.copy_(done[-1][1])
            mixer.conv.copy_(done[-1][2])
        for token in tokens[len(done) : depth]:
            o = mixer.run([token[0]], [1] * LAYERS, range(LAYERS))
            done.append((token, mixer.state.clone(), mixer.conv.clone(), o))
        token, state, window, o = done[depth - 1]
        return (state, window, token[1], o) if with_output else (state, window, token[1])

    def verify(self, trees, *, committed=None):
        """Begin, arrange and run trees by row; returns what ``keep`` needs and the outputs."""
        rows = np.array(list(trees), np.int32)
        starts = np.array([len(self.history[row]) for row in trees], np.int32)
        done = starts if committed is None else np.array(committed, np.int32)
        slots = rows + np.int32(1)
        self.keeper.begin(rows, slots, starts, done)
        sizes = [len(tree) for tree in trees.values()]
        cu = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        flat = FlatTrees.of(cu, np.concatenate([*trees.values(), []]).astype(np.int32))
        ragged = self.keeper.arrange(flat, cu[:-1], rows, slots, starts)
        x, hidden = self.tokens(int(cu[-1]))
        view, outputs = self.ops.view, []
        for layer, spec in enumerate(self.keeper.layers):
            out = torch.full((len(x), self.shape[1] * self.shape[3]), NAN)
            self.ops.mix_trees(
                view(x[:, layer].contiguous()), self.mixer.weights, ragged, view(self.conv[layer]),
                view(self.recurrent[layer]), spec, view(out),
            )  # fmt: skip
            outputs.append(out)
        return ragged, starts, x, hidden, torch.stack(outputs, 1)

    def round(self, trees, last_nodes, saves=(), *, committed=None):
        """One whole round; the path to each ``last_nodes[row]`` is consumed (None: nothing)."""
        ragged, starts, x, hidden, out = self.verify(trees, committed=committed)
        paths = []
        for tree, row in enumerate(trees):
            last = last_nodes[row]
            path = np.zeros(0, np.int32) if last is None else ragged.trees.path(tree, last)
            paths.append(path)
            first = int(ragged.trees.cu_nodes[tree])
            self.history[row] += [(x[first + node], hidden[first + node]) for node in path]
        self.keeper.keep(
            ragged, starts, paths, tuple(StateSave(*save) for save in saves), self.ops.view(hidden)
        )
        return out

    def settle(self, row):
        """What is pending of a row goes into its working state."""
        self.keeper.fold([StateFold(row, row + 1, len(self.history[row]))])

    def check(self, row, slot, depth):
        """A slot is the state of a row at a depth: bit by bit where the mode promises it."""
        state, window, hidden = self.plain(row, depth)
        if self.mode == "log":
            assert torch.allclose(self.recurrent[:, slot], state, atol=3e-5)
        else:
            assert torch.equal(self.recurrent[:, slot], state)
        assert torch.equal(self.conv[:, slot], window)
        assert torch.equal(self.hidden[slot], hidden)
