"""The target's stream against transformers, the work list, and what is stored of documents."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from draft_eval import OPEN_ROWS, pack
from draft_tokens import TURN_END_ID, Mix, Session, TokenStore, Work, cut_prompt, make_work, sample
from prepare_data import REPLY_BIT
from target_stream import TargetStream
from train import save
from transformers import Qwen3_5ForCausalLM

from tests.training.draft_support import TINY, tiny_target

LENGTH, NEW = 40, 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    """The tiny target, and transformers' from its file."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny_target()
    save(model, folder, {})
    return model, Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def outputs_of(other: Qwen3_5ForCausalLM, ids: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Hidden states after the final norm, keys and values [T, KV, D] of the last layer."""
    with torch.no_grad():
        found = other.model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=True)
    layer = found.past_key_values.layers[TINY.num_layers - 1]
    return (
        found.last_hidden_state[0],
        layer.keys[0].transpose(0, 1),
        layer.values[0].transpose(0, 1),
    )


@pytest.fixture(scope="module")
def session(pair) -> Session:
    """Eleven documents through four rows: greedy ones, sampled ones, and some only read."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, TINY.vocab, n).astype(np.uint16) for n in range(2, 24, 2)]
    prompts[3][2:5] |= REPLY_BIT
    prompts[3][4] = TURN_END_ID | REPLY_BIT  # an end inside a prompt ends nothing
    limits = [len(p) + (0 if n % 4 == 3 else NEW) for n, p in enumerate(prompts)]
    temperatures = [0.9 if n % 5 == 4 else 0.0 for n in range(len(prompts))]
    stream = TargetStream(pair[0], 4, LENGTH, kv_dtype=torch.float32)
    store = TokenStore(stream, 1000, torch.float32)
    session = Session(stream, store, Work.from_prompts(prompts, limits, temperatures))
    torch.manual_seed(0)
    session.run(math.inf)
    return session


def documents(session: Session):
    """(number in the work list, slice of the store) of every stored document."""
    ends = np.cumsum(session.store.sizes)
    for number, end, size in zip(session.store.numbers, ends, session.store.sizes, strict=True):
        yield number, slice(int(end - size), int(end))


def test_every_document_is_stored_once_with_its_prompt(session: Session):
    store, work = session.store, session.work
    assert sorted(store.numbers) == list(range(len(work.sizes)))
    for number, cut in documents(session):
        begin, size = work.begins[number], work.sizes[number]
        ids = store.ids[cut].numpy()
        prompt = work.tokens[begin : begin + size]
        assert np.array_equal(ids[:size], prompt & (REPLY_BIT - 1))
        ended = len(ids) > size and ids[-1] == TURN_END_ID
        assert len(ids) == work.limits[number] or ended
        assert store.position[cut].tolist() == list(range(len(ids)))
        in_reply = np.concatenate([prompt >= REPLY_BIT, np.ones(len(ids) - size, bool)])
        assert store.is_goal[cut].tolist() == [*in_reply[1:].tolist(), False]


def test_outputs_are_those_of_transformers(session: Session, pair):
    for _, cut in documents(session):
        stored = (session.store.hidden[cut], session.store.keys[cut], session.store.values[cut])
        for got, expected in zip(
            stored, outputs_of(pair[1], session.store.ids[cut].numpy()), strict=True
        ):
            assert float((got - expected).abs().max()) < 1e-4


def test_greedy_replies_are_the_best_tokens_and_sampled_ones_are_not(session: Session, pair):
    for number, cut in documents(session):
        ids, size = session.store.ids[cut].numpy(), session.work.sizes[number]
        best = pair[1].lm_head(outputs_of(pair[1], ids)[0]).argmax(-1).numpy()
        same = best[size - 1 : -1] == ids[size:]
        if len(same):
            assert same.all() == (session.work.temperatures[number] == 0), number


def test_a_full_store_and_the_end_of_time_stop_it(pair):
    prompts = [np.arange(3, 13, dtype=np.uint16)] * 20
    work = Work.from_prompts(prompts, [10] * 20, [0.0] * 20)
    stream = TargetStream(pair[0], 4, LENGTH, kv_dtype=torch.float32)
    store = TokenStore(stream, 95, torch.float32)
    Session(stream, store, work).run(math.inf)
    assert (store.count, store.sizes) == (80, [10] * 8)
    store = TokenStore(stream, 95, torch.float32)
    Session(stream, store, work).run(0.0)
    assert store.count == 0


def test_gathered_rows_hold_documents_and_padding(session: Session):
    store = session.store
    index = torch.tensor([[3, 4, 5, -1, -1]])
    rows, goal = store.rows(index)
    assert rows.ids.tolist() == [[*store.ids[3:6].tolist(), 0, 0]]
    assert rows.position.tolist() == [[*store.position[3:6].tolist(), 0, 0]]
    assert goal.tolist() == [[*store.is_goal[3:6].tolist(), False, False]]
    assert torch.equal(rows.hidden[0, :3], store.hidden[3:6])
    assert rows.keys.shape == (1, 5, TINY.num_kv_heads, TINY.head_dim)


def test_packing_keeps_every_document_whole_and_once():
    sizes = np.random.default_rng(0).integers(1, 30, 200)
    sizes[7] = 33
    index = pack(sizes, 32, np.random.default_rng(1).permutation(200))
    places = index[index >= 0]
    starts = np.cumsum(sizes) - sizes
    left_out = set(range(starts[7], starts[7] + 33))
    assert sorted(places.tolist()) == [n for n in range(sizes.sum()) if n not in left_out]
    for start, size in zip(starts, sizes, strict=True):
        row, column = np.nonzero(index == start)
        if len(row):
            cut = index[row[0], column[0] : column[0] + size]
            assert cut.tolist() == list(range(start, start + size))
    assert len(index) <= sizes.sum() / 32 * 1.1 + OPEN_ROWS


def chat(*sizes: int) -> np.ndarray:
    """Turns of these sizes, every second one a reply."""
    parts = [
        np.full(n, 5 + i, np.uint16) | np.uint16(REPLY_BIT * (i % 2)) for i, n in enumerate(sizes)
    ]
    return np.concatenate(parts)


def test_prompts_end_where_a_reply_begins():
    rng = np.random.default_rng(0)
    talk = chat(4, 3, 2, 6)
    found = {len(cut_prompt(talk, 50, rng)) for _ in range(30)}
    assert found == {4, 9}
    assert {len(cut_prompt(talk, 8, rng)) for _ in range(30)} == {4}
    assert cut_prompt(talk, 3, rng) is None
    assert len(cut_prompt(chat(7), 7, rng)) == 7
    assert cut_prompt(chat(7), 6, rng) is None


def test_the_work_list_keeps_its_limits():
    chats = [chat(4, 3, 2, 6), chat(7), chat(30, 4)]
    mix = Mix(max_prompt=24, max_new=10, documents=0.2, joined=0.5, greedy=0.5)
    work = make_work(chats, np.tile([0, 1, 2], 100), mix, 0)
    assert len(work.sizes) > 200
    assert len(work.tokens) == work.sizes.sum()
    assert work.sizes.max() <= 24
    assert {int(x) for x in work.limits - work.sizes} == {0, 10}
    cold = work.temperatures == 0
    assert 0.3 < cold.mean() < 0.7
    assert work.temperatures[~cold].min() >= 0.4
    again = make_work(chats, np.tile([0, 1, 2], 100), mix, 0)
    assert np.array_equal(work.tokens, again.tokens)


def test_sampling_follows_the_distribution():
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 3.0]).expand(4000, -1)
    tokens = sample(logits, torch.full((4000,), 2.0))
    shares = torch.bincount(tokens, minlength=3) / 4000
    assert float((shares - (logits[0] / 2).softmax(0)).abs().max()) < 0.03
    assert sample(logits[:2], torch.zeros(2)).tolist() == [2, 2]
