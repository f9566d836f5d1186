"""Following drafts: the target's tokens are those of plain sampling, whatever was proposed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyradix.request import SamplingParams
from hyradix.sampling.sampler import Sampler
from hyradix.spec_decode.acceptance import Accepted, Candidates, follow

V, EOS = 12, 3


def model(prefix: tuple[int, ...]) -> torch.Tensor:
    """Logits that depend on the whole prefix."""
    generator = torch.Generator().manual_seed(hash(prefix) % (1 << 62))
    return torch.randn(V, generator=generator) * 2


def make_sampler(params: SamplingParams, prompt: list[int], num_rows: int) -> Sampler:
    sampler = Sampler(num_rows, V, (EOS,))
    for row in range(num_rows):
        sampler.init_row(row, params, 40 + row, np.array(prompt, np.int32), len(prompt))
    return sampler


def plain(params: SamplingParams, prompt: list[int], row: int, count: int) -> list[int]:
    """Token by token, without drafts."""
    sampler = make_sampler(params, prompt, row + 1)
    tokens = list(prompt)
    for _ in range(count):
        logits = model(tuple(tokens))[None]
        at = np.array([len(tokens)], np.int64)
        tokens.append(int(sampler.sample(logits, np.array([row], np.int32), at).token_ids[0]))
    return tokens[len(prompt) :]


def verify(
    sampler: Sampler,
    prefixes: list[tuple[int, ...]],
    trees: list[tuple[list[int], list[int]]],
    max_accepted: list[int],
) -> Accepted:
    """Trees of (tokens, parents); a root's token is the last of its prefix."""
    cu, logits = [0], []
    for prefix, (tokens, parents) in zip(prefixes, trees, strict=True):
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append(paths[parent] + (token,) if parent >= 0 else prefix)
            logits.append(model(paths[-1]))
        cu.append(cu[-1] + len(tokens))
    candidates = Candidates(
        rows=np.arange(len(trees), dtype=np.int32),
        positions=np.array([len(prefix) - 1 for prefix in prefixes], np.int32),
        cu_nodes=np.array(cu, np.int32),
        parents=np.array([p for _, ps in trees for p in ps], np.int32),
        token_ids=np.array([t for ts, _ in trees for t in ts], np.int32),
        max_accepted=np.array(max_accepted, np.int32),
    )
    return follow(sampler, torch.stack(logits), candidates)


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=None),
    SamplingParams(temperature=1.0, max_tokens=None),
    SamplingParams(temperature=0.8, top_k=4, top_p=0.9, max_tokens=None),
    SamplingParams(temperature=0.9, repetition_penalty=1.4, presence_penalty=0.7, max_tokens=None),
    SamplingParams(temperature=0.0, frequency_penalty=1.5, min_tokens=3, max_tokens=None),
]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("seed", range(8))
def test_rounds_of_random_drafts_say_what_plain_decode_says(params: SamplingParams, seed: int):
    """Several rounds, three rows at once; drafts right, wrong, wide, deep, or none."""
    rng = np.random.default_rng(seed)
    num_rows, count = 3, 9
    prompt = [5, 1, 7]
    expected = [plain(params, prompt, row, count * 6) for row in range(num_rows)]
    sampler = make_sampler(params, prompt, num_rows)
    done: list[list[int]] = [[] for _ in range(num_rows)]
    while min(map(len, done)) < count:
        trees, limits = [], []
        for row in range(num_rows):
            root = [*prompt, *done[row]][-1]
            tokens, parents = [root], [-1]
            right = 0
            for _ in range(rng.integers(0, 7)):
                parent = int(rng.integers(0, len(tokens)))
                at = len(done[row]) + _depth(parents, parent)
                is_right = rng.random() < 0.6 and parent == right
                token = expected[row][at] if is_right else int(rng.integers(0, V))
                if any(p == parent and t == token for p, t in zip(parents, tokens, strict=True)):
                    continue
                tokens.append(token)
                parents.append(parent)
                right = len(tokens) - 1 if is_right else right
            trees.append((tokens, parents))
            limits.append(int(rng.integers(1, 6)))
        prefixes = [(*prompt, *done[row]) for row in range(num_rows)]
        accepted = verify(sampler, prefixes, trees, limits)
        for row in range(num_rows):
            new, path = accepted.token_ids[row], accepted.paths[row]
            assert len(new) == len(path) <= limits[row]
            on_path = [trees[row][0][node] for node in path[1:]]
            assert on_path == new[:-1]
            done[row] += new
    for row in range(num_rows):
        assert done[row][:count] == expected[row][:count]


def _depth(parents: list[int], node: int) -> int:
    return 0 if node == 0 else 1 + _depth(parents, parents[node])


def test_a_path_ends_at_the_end_of_sequence() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={EOS: 100.0}, max_tokens=None)
    accepted = verify(make_sampler(params, [5], 1), [(5,)], [([5, EOS, EOS], [-1, 0, 1])], [3])
    assert accepted.token_ids == [[EOS]]
    assert accepted.paths == [[0]]


def test_min_tokens_let_it_go_on() -> None:
    params = SamplingParams(
        temperature=0.0, logit_bias={EOS: 100.0, 4: 90.0}, min_tokens=1, max_tokens=None
    )
    accepted = verify(make_sampler(params, [5], 1), [(5,)], [([5, 4, EOS], [-1, 0, 1])], [3])
    assert accepted.token_ids == [[4, EOS]]
    assert accepted.paths == [[0, 1]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_node_that_is_not_finite_is_not_entered(bad: float) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None)
    sampler = make_sampler(params, [5], 2)
    logits = torch.zeros(3, V)
    logits[0, 7] = 1.0
    logits[1, 2] = bad
    logits[2, 1] = bad
    candidates = Candidates(
        rows=np.array([0, 1], np.int32),
        positions=np.array([0, 0], np.int32),
        cu_nodes=np.array([0, 2, 3], np.int32),
        parents=np.array([-1, 0, -1], np.int32),
        token_ids=np.array([5, 7, 5], np.int32),
        max_accepted=np.array([2, 1], np.int32),
    )
    accepted = follow(sampler, logits, candidates)
    assert accepted.token_ids[0] == [7]
    assert accepted.paths == [[0], [0]]
    assert accepted.is_faulty.tolist() == [False, True]


def test_logprobs_of_every_token_of_the_run() -> None:
    params = SamplingParams(temperature=0.0, logprobs=2, ignore_eos=True, max_tokens=None)
    first, second = plain(params, [5], 0, 2)
    accepted = verify(make_sampler(params, [5], 1), [(5,)], [([5, first, 0], [-1, 0, 1])], [3])
    (logprobs,) = accepted.logprobs
    assert logprobs is not None
    assert logprobs.token_ids[:2].tolist() == [first, second]
    assert logprobs.top_ids.shape == (len(accepted.token_ids[0]), 2)
