"""The draft heads: all positions at once against one at a time, names, sizes, the loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from draft_eval import count_rounds
from draft_loss import aims, draft_losses
from draft_model import INTERMEDIATE, chain_attention, make_heads, seen_pairs, seen_target
from install_drafts import HEADS_LIMIT
from model import Shape
from safetensors.torch import load_file
from train import load_weights

from tests.training.draft_support import (
    NaiveChain,
    naive_head,
    naive_rounds,
    random_rows,
    tiny_heads,
)

DOCUMENTS = [1, 7, 2, 5]
HEADS = ("mtp", "frozen_kv_mtp")


def chains_of(head, rows, embed, row: int, begin: int):
    """A function from a place in the document at `begin` to a naive chain that starts there."""
    naive = naive_head(head, embed)

    def start(place: int) -> NaiveChain:
        cut = slice(begin, begin + place)
        ids = rows.ids[row, cut].tolist()
        parts = (rows.hidden[row, cut], rows.keys[row, cut], rows.values[row, cut])
        return NaiveChain(naive, ids, *parts)

    return start


@pytest.mark.parametrize("name", HEADS)
def test_all_positions_at_once_equal_one_at_a_time(name: str):
    rows, embed = random_rows(DOCUMENTS)
    head, num_steps = tiny_heads()[name], 4
    with torch.no_grad():
        steps = [rows.shaped(x) for x in head.steps(rows, embed, num_steps)]
    compared = 0
    for row in range(2):
        for number, size in enumerate(DOCUMENTS):
            begin = sum(DOCUMENTS[:number])
            start = chains_of(head, rows, embed, row, begin)
            for place in range(1, size):
                chain = start(place)
                for k in range(min(num_steps, size - place)):
                    expected = chain.step(int(rows.ids[row, begin + place + k]))
                    error = float((steps[k][row, begin + place] - expected).abs().max())
                    assert error < 1e-12, (row, number, place, k)
                    compared += 1
    assert compared == 2 * (4 * 3 + 3 + 2 + 1 + 1 + 4 + 3 + 2 + 1)


@pytest.mark.parametrize("name", HEADS)
def test_nothing_of_other_documents_or_of_the_future_is_seen(name: str):
    rows, embed = random_rows(DOCUMENTS, rows=1)
    head = tiny_heads()[name]
    before = [x.detach() for x in head.steps(rows, embed, 3)]
    begin, place = 1, 4  # in the document of seven tokens
    at = begin + place
    for part in (rows.hidden, rows.keys, rows.values):
        part[0, : begin - 1] = torch.nan
        part[0, :begin] *= 3.0
        part[0, at:] *= 3.0
    rows.ids[0, :begin], rows.ids[0, at + 3 :] = 5, 6
    after = [x.detach() for x in head.steps(rows, embed, 3)]
    for k in range(3):
        assert torch.equal(before[k][at], after[k][at]), k
        assert not torch.equal(before[k][at + 1], after[k][at + 1]), k


def test_masks_of_a_row_with_three_documents():
    position = torch.tensor([[0, 1, 2, 0, 0, 1]])
    assert seen_pairs(position)[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert seen_target(position)[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 0],
    ]


def test_attention_without_a_chain_is_plain_attention():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 6, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    mask = seen_pairs(torch.arange(5).expand(2, -1))
    got = chain_attention(q, k, v, [], mask)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, mask[:, None], enable_gqa=True)
    assert float((got - expected.transpose(1, 2)).abs().max()) < 1e-6


@pytest.mark.parametrize("name", HEADS)
def test_rounds_counted_from_one_pass_are_those_of_real_drafting(name: str):
    """The reply follows the head's own greedy drafts for a while and then does not."""
    rows, embed = random_rows([40], rows=1)
    head = tiny_heads()[name]
    start = chains_of(head, rows, embed, 0, 0)
    for place in (6, 7, 8, 12, 20, 21):  # tokens after this one are what a chain would say
        chain, token = start(place), int(rows.ids[0, place])
        for k in range(4):
            token = int((embed @ chain.step(token)).argmax())
            rows.ids[0, place + k + 1] = token
    with torch.no_grad():
        best = [(x @ embed.mT).argmax(-1) for x in head.steps(rows, embed, 6)]
    right = torch.stack([b == rows.later(k + 1) for k, b in enumerate(best)], 1).numpy()
    first, reply = 5, rows.ids[0, 5:].tolist()
    counts = {c: count_rounds(right[first:], c) for c in (1, 3, 6)}
    assert counts == {c: naive_rounds(start, reply, first, c) for c in (1, 3, 6)}
    assert counts[3] < counts[1] < len(reply) - 1


def test_loss_is_the_mean_over_places_before_reply_tokens():
    rows, embed = random_rows([6, 4], rows=1)
    goal = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1, 0]], dtype=torch.bool)
    heads = list(tiny_heads().values())
    losses = draft_losses(heads, rows, goal, embed, num_steps=3, most=99, hard_share=0.25)
    # step k at an anchor counts if the token it guesses is a reply's; place 6 is a first token
    anchors = [[2, 3, 4, 7, 8], [2, 3, 7], [2]]
    for head, loss in zip(heads, losses, strict=True):
        for k, out in enumerate(head.steps(rows, embed, 3)):
            expected = []
            for a in anchors[k]:
                target = embed @ rows.hidden[0, a + k]
                aim = 0.75 * target.softmax(0)
                aim[target.argmax()] += 0.25
                expected.append(-(aim * (embed @ out[a]).log_softmax(0)).sum())
            assert abs(float((loss[k] - torch.stack(expected).mean()).detach())) < 1e-5
    torch.stack(losses).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in heads[0].parameters())
    capped = draft_losses(heads, rows, goal, embed, num_steps=2, most=2, hard_share=0.25)
    assert all(bool(x.isfinite().all()) for x in capped)


def test_aims_are_distributions():
    torch.manual_seed(0)
    aim = aims(torch.randn(5, 8), torch.randn(30, 8), 0.5)
    assert float((aim.sum(-1) - 1).abs().max()) < 1e-6
    assert bool((aim.amax(-1) > 0.5).all())


def test_names_and_sizes_of_the_shipped_heads(shipped: Path):
    shape = Shape()
    heads = make_heads(shape, INTERMEDIATE)
    names = {name for head in heads.values() for name in head.table}
    ends = "input_layernorm post_attention_layernorm self_attn.q_proj self_attn.q_norm "
    ends += "self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj"
    expected = {
        f"{head}.{name}.weight"
        for head in HEADS
        for name in (
            "fc",
            "norm",
            "pre_fc_norm_embedding",
            "pre_fc_norm_hidden",
            *(f"layers.0.{end}" for end in ends.split()),
        )
    }
    own = [f"mtp.layers.0.self_attn.{n}.weight" for n in ("k_proj", "v_proj", "k_norm")]
    assert names == expected | set(own)
    target = load_file(shipped / "model.safetensors")
    for name, parameter in heads["mtp"].table.items():
        if ".layers.0." in name:  # the public layout: a layer of the target's own shapes
            other = name.replace("mtp.layers.0.", "model.layers.7.")
            assert parameter.shape == target[other].shape, name
    size = sum(2 * p.numel() for head in heads.values() for p in head.parameters())
    assert size < HEADS_LIMIT - 10_000


def test_heads_start_from_the_last_attention_layer(shipped: Path):
    weights = load_weights(shipped)
    for name, head in make_heads(Shape(), INTERMEDIATE).items():
        head.start_from(weights, 7)
        q = head.table[f"{name}.layers.0.self_attn.q_proj.weight"]
        assert torch.equal(q, weights["model.layers.7.self_attn.q_proj.weight"].float())
        assert torch.equal(head.table[f"{name}.norm.weight"], weights["model.norm.weight"].float())
