"""The recurrent mixers: against their definitions, compiled against torch, saves, splits."""

from __future__ import annotations

import math

import pytest
import torch

from hyradix.kernels.compiled_ops import CompiledOps
from tests.kernels.mixer_cases import (
    BACKENDS,
    FAMILIES,
    Mamba2Mixer,
    backends,
    cases,
    cut,
)

LARGE = [(family, family.SHAPES[3 if family.rule.has_delta else 2]) for family in FAMILIES]
SMALL = [(family, shape) for family in FAMILIES for shape in family.SHAPES[:2]]


@backends
@cases
def test_one_sequence_equals_the_definition(ops, family, shape):
    mixer = family(shape, ops)
    inputs = mixer.inputs(70)
    mixer.clear(1)
    o = mixer.run(inputs, [70], [1], [(0, 17, 2)])
    expected, states = mixer.by_definition(inputs)
    assert torch.allclose(o.double(), expected, atol=mixer.atol)
    assert torch.allclose(mixer.state[1].double(), states[-1], atol=2e-5)
    assert torch.allclose(mixer.state[2].double(), states[16], atol=2e-5)
    raw, kept = inputs[0][:, : mixer.channels], mixer.width - 1
    assert torch.equal(mixer.conv[1], raw[70 - kept :])
    assert torch.equal(mixer.conv[2], raw[17 - kept : 17])


@cases
def test_compiled_equals_torch_on_a_ragged_batch(family, shape):
    results = []
    for ops in BACKENDS:
        mixer = family(shape, ops)
        lengths, slots = [1, 70, 0, 3, 2], [4, 1, 10, 7, 2]
        mixer.clear(*slots)
        saves = [(1, 1, 5), (1, 64, 6), (1, 70, 8), (3, 2, 9)]
        x = mixer.inputs(sum(lengths))
        first = mixer.run(x, lengths, slots, saves)
        second = mixer.run([part.flip(0) for part in x], lengths, slots)
        results.append((first, second, mixer.state, mixer.conv))
    for ours, twin in zip(*results, strict=True):
        assert torch.allclose(ours, twin, atol=family.atol, equal_nan=True)
    assert results[0][2][[0, 3, 11]].isnan().all()
    assert (results[0][2][10] == 0).all()


@cases
def test_saves_at_every_position_are_bitwise_the_state_of_a_shorter_run(family, shape):
    mixer = family(shape, CompiledOps())
    x = mixer.inputs(9)
    mixer.clear(1)
    mixer.run(x, [9], [1], [(0, count, count + 2) for count in range(1, 10)])
    for count in range(1, 10):
        shorter = family(shape, CompiledOps())
        shorter.clear(1)
        shorter.run(cut(x, slice(count)), [count], [1])
        assert torch.equal(shorter.state[1], mixer.state[count + 2])
        assert torch.equal(shorter.conv[1], mixer.conv[count + 2])


@cases
@pytest.mark.parametrize("size", [1, 2, 64, 100])
def test_splitting_changes_no_bit(family, shape, size):
    whole, split = family(shape, CompiledOps()), family(shape, CompiledOps())
    x = whole.inputs(130)
    whole.clear(1)
    split.clear(1)
    o = whole.run(x, [130], [1])
    parts = []
    for first in range(0, 130, size):
        piece = cut(x, slice(first, first + size))
        parts.append(split.run(piece, [len(piece[0])], [1]))
    assert torch.equal(torch.cat(parts), o)
    assert torch.equal(split.state[1], whole.state[1])
    assert torch.equal(split.conv[1], whole.conv[1])


@pytest.mark.parametrize(("family", "shape"), [*LARGE, (Mamba2Mixer, (1, 24, 16, 64, 4, 1))])
def test_neighbours_and_threads_change_no_bit(family, shape):
    alone, among = family(shape, CompiledOps()), family(shape, CompiledOps())
    for mixer in (alone, among):
        mixer.clear(*range(12))
    alone.ops._parallel_from = math.inf
    among.ops._parallel_from = -1
    x = alone.inputs(11)
    o = alone.run(cut(x, slice(3, 4)), [1], [5])  # one thread
    many = among.run(x, [1] * 11, [1, 2, 3, 5, 4, 6, 7, 8, 9, 10, 11])  # all threads
    assert torch.equal(o[0], many[3])
    assert torch.equal(alone.state[5], among.state[5])
    assert torch.equal(alone.conv[5], among.conv[5])


@backends
@pytest.mark.parametrize(("family", "shape"), SMALL)
def test_a_faulty_sequence_harms_no_other(ops, family, shape):
    mixer = family(shape, ops)
    mixer.clear(1, 3)
    x = mixer.inputs(6)
    x[mixer.decay_input][4, -1] = float("nan")  # a decay: clamping must not hide it
    o = mixer.run(x, [2, 2, 2], [1, 2, 3])  # slot 2 is NaN
    assert o[:2].isfinite().all()
    assert o[2:4].isnan().any()
    assert o[4].isnan().any()
