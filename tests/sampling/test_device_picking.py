"""Sampling without waiting picks the tokens that its twin in ``picking.py`` picks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyradix.kernels.argmax.reference import best_of
from hyradix.request import SamplingParams
from hyradix.sampling.device_picking import BLOCK, draw_into
from hyradix.sampling.picking import Controls, pick
from hyradix.sampling.race import keys
from hyradix.sampling.row_controls import NARROW, RowControls
from hyradix.sampling.sampler import Sampler

PARAMS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_k=200, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=NARROW, min_p=0.01),
    SamplingParams(temperature=1.0, top_k=NARROW + 30),
    SamplingParams(temperature=2.0, top_p=0.95),
    SamplingParams(temperature=0.9, top_p=0.4, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=100_000, top_p=0.5),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=1),
)


def drawn(controls: RowControls, logits: torch.Tensor, rows, positions) -> np.ndarray:
    found = torch.full((2, len(logits)), -9, dtype=torch.int32)
    best_of(logits, found)
    for group in controls.draw(rows, positions):
        draw_into(
            logits,
            torch.from_numpy(group.index),
            torch.from_numpy(group.numbers),
            found,
            is_narrow=group.is_narrow,
            is_open=group.is_open,
        )
    return found.numpy()


def make(logits: torch.Tensor, seed: int) -> tuple[RowControls, Sampler, np.ndarray, np.ndarray]:
    count = len(logits)
    controls, sampler = RowControls(count), Sampler(count, logits.shape[1], ())
    for row in range(count):
        params = PARAMS[row % len(PARAMS)]
        controls.init_row(row, params, seed + row, 3)
        sampler.init_row(row, params, seed + row, np.zeros(3, np.int32), 3)
    rows = np.random.default_rng(seed).permutation(count).astype(np.int32)
    return controls, sampler, rows, np.arange(count) + 5


@pytest.mark.parametrize("vocab_size", [3, 61, NARROW, NARROW + 1, 2000])
@pytest.mark.parametrize("step", [0.0, 0.25, 2.0])
def test_tokens_are_the_samplers_ties_and_faults_included(vocab_size: int, step: float) -> None:
    """step: logits are rounded to multiples of it, so that most have equals."""
    generator = torch.Generator().manual_seed(vocab_size)
    for seed in range(4):
        logits = 3 * torch.randn(2 * BLOCK + 5, vocab_size, generator=generator)
        if step:
            logits = (logits / step).round() * step
        logits[3, 1] = torch.nan
        logits[4, 0] = torch.inf
        logits[8] = -torch.inf
        logits[12:20, : vocab_size // 2] = -torch.inf
        controls, sampler, rows, positions = make(logits, seed)
        expected = sampler.sample(logits, rows, positions)
        found = drawn(controls, logits, rows, positions)
        assert found[0].tolist() == expected.token_ids.tolist()
        assert (found[1] != 0).tolist() == expected.is_faulty.tolist()


@given(
    values=st.lists(st.integers(-4, 4), min_size=2, max_size=40),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 50),
)
@settings(max_examples=150, deadline=None)
def test_any_controls(values, temperature, top_k, top_p, min_p, seed) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.tensor([values], dtype=torch.float32)
    controls = RowControls(1)
    controls.init_row(0, params, seed, 0)
    rows, positions = np.zeros(1, np.int32), np.array([seed + 1])
    key = torch.from_numpy(keys(np.array([seed]), positions))
    expected = pick(logits, Controls.of([params], logits.device), key)
    if params.is_greedy:
        expected = logits.argmax(1)
    assert drawn(controls, logits, rows, positions)[0].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("options", "is_needed"),
    [
        ({}, False),
        ({"temperature": 0.7, "top_p": 0.5}, False),
        ({"logprobs": 0}, True),
        ({"presence_penalty": 0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"logit_bias": {3: 1.0}}, True),
    ],
)
def test_who_needs_the_host(options: dict[str, object], is_needed: bool) -> None:
    controls = RowControls(2)
    controls.init_row(1, SamplingParams(**options), 0, 4)
    assert controls.need_host(np.array([1], np.int32), np.array([4])) is is_needed
    controls.init_row(1, SamplingParams(), 0, 4)
    assert not controls.need_host(np.array([0, 1], np.int32), np.array([9, 4]))


def test_min_tokens_need_the_host_until_they_are_there() -> None:
    controls = RowControls(1)
    controls.init_row(0, SamplingParams(min_tokens=3, max_tokens=9), 0, 4)
    rows = np.zeros(1, np.int32)
    assert [controls.need_host(rows, np.array([p])) for p in (4, 5, 6, 7)] == [True] * 3 + [False]
