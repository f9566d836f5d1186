"""The sampler against its readable twin, and the promises of its docstring."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sampler import reference_token

from hyradix.request import SamplingParams
from hyradix.sampling import picking, race
from hyradix.sampling.sampler import Sampler, SampleResult

V = 24
EOS = (2, 3)


def run(sampler: Sampler, logits: torch.Tensor, rows: list[int], at: list[int]) -> SampleResult:
    return sampler.sample(logits, np.array(rows, np.int32), np.array(at, np.int64))


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def one_row(params: SamplingParams, seed: int = 0, prompt=(), output=(), size: int = V) -> Sampler:
    sampler = Sampler(1, size, EOS)
    sampler.init_row(0, params, seed, ids(*prompt, *output), len(prompt))
    return sampler


def frequencies(logits: torch.Tensor, params: SamplingParams, draws: int) -> np.ndarray:
    sampler = one_row(params, seed=7, size=len(logits))
    out = [run(sampler, logits[None], [0], [i]).token_ids[0] for i in range(draws)]
    return np.bincount(out, minlength=len(logits))


params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.none(),
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.5]),
    top_p=st.sampled_from([0.01, 0.33, 0.77, 0.95, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, V - 1, V, V + 50]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, 3.0])),
    min_tokens=st.integers(0, 6),
    ignore_eos=st.booleans(),
    stop_token_ids=st.none() | st.lists(st.integers(0, V - 1), max_size=2),
)
# A coarse grid makes ties common; -inf is what masks leave behind.
logits_strategy = st.lists(
    st.integers(-9, 9).map(lambda x: x / 3) | st.just(-np.inf), min_size=V, max_size=V
)
tokens_strategy = st.lists(st.integers(0, V - 1), max_size=12)


@given(
    rows=st.lists(
        st.tuples(
            logits_strategy,
            params_strategy,
            st.integers(-(2**63), 2**63 - 1),
            tokens_strategy,
            tokens_strategy,
        ),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=200, deadline=None)
def test_equals_the_reference(rows) -> None:
    compare_with_reference(rows)
    # A narrow first look, so that rows are decided in it, or not, as with large vocabularies.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(picking, "_WIDTH", 5)
        compare_with_reference(rows)
        patch.setattr(race, "BLOCK", 4)
        compare_with_reference(rows)


def compare_with_reference(rows) -> None:
    sampler = Sampler(8, V, EOS)
    numbers = [7 - i for i in range(len(rows))]
    for number, (_, params, seed, prompt, output) in zip(numbers, rows, strict=True):
        sampler.init_row(number, params, seed, ids(*prompt, *output), len(prompt))
    logits = torch.tensor([row[0] for row in rows], dtype=torch.float32)
    result = run(sampler, logits, numbers, [len(p) + len(o) for *_, p, o in rows])
    for i, (values, params, seed, prompt, output) in enumerate(rows):
        expected = reference_token(values, params, seed, prompt, output, EOS)
        assert result.is_faulty[i] == (expected is None)
        assert expected is None or result.token_ids[i] == expected


@given(
    params=params_strategy, seed=st.integers(0, 99), prompt=tokens_strategy, cut=st.integers(0, 7)
)
@settings(max_examples=60, deadline=None)
def test_a_preempted_row_goes_on_as_if_it_had_not_been(params, seed, prompt, cut) -> None:
    logits = torch.randn(8, V, generator=torch.Generator().manual_seed(seed)) * 3

    def generate(sampler: Sampler, row: int, tokens: list[int], until: int) -> list[int]:
        for i in range(len(tokens), until):
            tokens.append(
                int(run(sampler, logits[i : i + 1], [row], [len(prompt) + i]).token_ids[0])
            )
        return tokens

    whole = generate(one_row(params, seed, prompt), 0, [], 8)
    begun = generate(one_row(params, seed, prompt), 0, [], cut)
    resumed = Sampler(4, V, EOS)
    resumed.init_row(3, SamplingParams(presence_penalty=2.0), 5, ids(1, 1, 1), 1)
    resumed.init_row(3, params, seed, ids(*prompt, *begun), len(prompt))
    assert generate(resumed, 3, begun, 8) == whole


def test_a_token_does_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    count, size = 40, 5000
    logits = torch.randn(count, size, generator=generator)
    params = [
        SamplingParams(
            temperature=(0.0, 0.5, 1.0, 3.0)[i % 4],
            top_p=(1.0, 0.9)[i % 2],
            top_k=(0, 40, 300)[i % 3],
            min_p=(0.0, 0.02)[i // 2 % 2],
            frequency_penalty=(0.0, 0.3)[i // 3 % 2],
        )
        for i in range(count)
    ]

    def sample(order: list[int], first_row: int) -> dict[int, int]:
        sampler = Sampler(100, size, EOS)
        for j, i in enumerate(order):
            sampler.init_row(first_row + j, params[i], 1000 + i, ids(1, i), 1)
        rows = [first_row + j for j in range(len(order))]
        result = run(sampler, logits[order], rows, [50 + i for i in order])
        return dict(zip(order, result.token_ids.tolist(), strict=True))

    together = sample(list(range(count)), 0)
    assert sample(list(reversed(range(count))), 50) == together
    assert {i: sample([i], 9)[i] for i in range(count)} == together


@pytest.mark.parametrize("bad", ["nan", "inf", "all -inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_faulty_row_leaves_the_others_alone(bad: str, temperature: float) -> None:
    sampler = Sampler(3, V, EOS)
    for row in range(3):
        params = SamplingParams(temperature=temperature, logprobs=1 if temperature else None)
        sampler.init_row(row, params, row, ids(1), 1)
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    clean = run(sampler, logits, [0, 1, 2], [1, 1, 1])
    spoiled = logits.clone()
    spoiled[1, 5:] = {"nan": torch.nan, "inf": torch.inf, "all -inf": -torch.inf}[bad]
    if bad == "all -inf":
        spoiled[1] = -torch.inf
    result = run(sampler, spoiled, [0, 1, 2], [1, 1, 1])
    assert result.is_faulty.tolist() == [False, True, False]
    assert result.token_ids[[0, 2]].tolist() == clean.token_ids[[0, 2]].tolist()
    assert result.logprobs[1] is None


def test_a_row_whose_every_token_is_masked_is_faulty() -> None:
    sampler = one_row(SamplingParams(min_tokens=2, temperature=0.0))
    logits = torch.full((1, V), -torch.inf)
    logits[0, EOS[0]] = 1.0
    assert run(sampler, logits, [0], [0]).is_faulty[0]


def test_logits_are_not_modified() -> None:
    sampler = one_row(SamplingParams(logit_bias={1: 5.0}, min_tokens=3, min_p=0.2))
    logits = torch.randn(1, V)
    before = logits.clone()
    run(sampler, logits, [0], [0])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_may_be_empty(temperature: float) -> None:
    result = run(one_row(SamplingParams(temperature=temperature)), torch.empty(0, V), [], [])
    assert result.token_ids.shape == result.is_faulty.shape == (0,)
    assert result.logprobs == ()


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 2.0])
    draws = 4000
    expected = (logits.double() / 0.8).softmax(0).numpy() * draws
    observed = frequencies(logits, SamplingParams(temperature=0.8), draws)
    # chi-square, 5 degrees of freedom: 20.5 is exceeded once in a thousand
    assert ((observed - expected) ** 2 / expected).sum() < 20.5


def test_neighbouring_seeds_are_independent() -> None:
    logits = torch.zeros(10)
    table = np.zeros((10, 10))
    samplers = [one_row(SamplingParams(), seed, size=10) for seed in range(3001)]
    drawn = [int(run(s, logits[None], [0], [17]).token_ids[0]) for s in samplers]
    np.add.at(table, (drawn[:-1], drawn[1:]), 1)
    # chi-square, 99 degrees of freedom
    assert ((table - 30) ** 2 / 30).sum() < 149


def test_top_p_with_ties_keeps_the_fewest_lowest_ids() -> None:
    observed = frequencies(torch.zeros(1000), SamplingParams(top_p=0.01), 400)
    assert set(observed.nonzero()[0]) == set(range(10))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 8.0])
def test_top_p_of_a_large_vocabulary_does_not_depend_on_how_far_one_looks(
    temperature: float,
) -> None:
    # A coarse grid as bfloat16 makes it: ties across every cut.
    logits = torch.randn(30_000, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    sampler = one_row(SamplingParams(top_p=0.8, temperature=temperature), size=30_000)
    token = int(run(sampler, logits[None], [0], [5]).token_ids[0])
    params = SamplingParams(top_p=0.8, temperature=temperature)
    assert token == reference_token(logits.tolist(), params, 0, [1] * 5, [], EOS)


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    sampler = Sampler(3, V, EOS)
    params = SamplingParams(temperature=0.0, logprobs=3, logit_bias={4: 100.0})
    sampler.init_row(0, params, 0, ids(1), 1)
    sampler.init_row(1, SamplingParams(temperature=0.0), 0, ids(1), 1)
    sampler.init_row(2, SamplingParams(temperature=0.0, logprobs=0), 0, ids(1), 1)
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    result = run(sampler, logits, [0, 1, 2], [1, 1, 1])
    raw = logits[0].log_softmax(0)
    first, second, third = result.logprobs
    assert result.token_ids[0] == 4
    assert second is None
    assert first is not None
    assert third is not None
    assert first.logprobs[0] == pytest.approx(float(raw[4]))
    assert first.ranks[0] == 1 + int((raw > raw[4]).sum())
    assert first.top_ids.tolist() == [raw.argsort(descending=True)[:3].tolist()]
    assert first.top_logprobs[0].tolist() == pytest.approx(raw.topk(3).values.tolist())
    assert third.top_ids.shape == (1, 0)
    assert third.ranks.tolist() == [1]


def test_prompt_logprobs_of_many_positions() -> None:
    logits = torch.randn(150, V, generator=torch.Generator().manual_seed(0))
    tokens = np.arange(150, dtype=np.int32) % V
    result = Sampler(1, V, EOS).logprobs_of(logits, tokens, 2)
    raw = logits.log_softmax(-1)
    assert result.logprobs == pytest.approx(raw[np.arange(150), tokens].numpy())
    assert result.top_ids.shape == (150, 2)
    assert result.top_ids[:, 0].tolist() == logits.argmax(-1).tolist()
    empty = Sampler(1, V, EOS).logprobs_of(logits[:0], tokens[:0], 2)
    assert empty.logprobs.shape == (0,)
