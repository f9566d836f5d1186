"""The readable twin of ``hyradix.sampling``: one row at a time, plain Python floats."""

from __future__ import annotations

import math

import numpy as np

from hyradix.request import SamplingParams
from hyradix.sampling import race


def reference_token(
    logits: list[float],
    params: SamplingParams,
    seed: int,
    prompt: list[int],
    output: list[int],
    eos_token_ids: tuple[int, ...],
) -> int | None:
    """The token after ``prompt + output``; None when the row is faulty."""
    if any(math.isnan(x) or x == math.inf for x in logits) or max(logits) == -math.inf:
        return None
    values = _adjusted(np.array(logits, np.float32), params, prompt, output, eos_token_ids)
    if max(values) == -math.inf:
        return None
    if params.is_greedy:
        return values.index(max(values))
    best = max(values)
    weights = [math.exp((x - best) / params.temperature) for x in values]
    kept = _kept(values, weights, params)
    key = int(race.keys(np.array([seed]), np.array([len(prompt) + len(output)]))[0])
    return _first_to_arrive({i: weights[i] for i in kept}, math.ceil(len(values) / race.BLOCK), key)


def _first_to_arrive(weights: dict[int, float], num_blocks: int, key: int) -> int:
    sums = dict.fromkeys(range(num_blocks), 0.0)
    for i, weight in weights.items():
        sums[i % num_blocks] += weight
    block = max(sums, key=lambda b: sums[b] / _clock(key, -1 - b))
    inside = [i for i in weights if i % num_blocks == block]
    return max(inside, key=lambda i: weights[i] / _clock(key, i))


def _clock(key: int, index: int) -> float:
    """splitmix64, to an exponential number."""
    x = (key + index * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x ^= x >> 31
    return -math.log(((x >> 12) + 0.5) / 2**52)


def _adjusted(values, params, prompt, output, eos_token_ids) -> list[float]:
    for token in {*prompt, *output}:
        penalty = np.float32(params.repetition_penalty)
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in set(output):
        values[token] -= np.float32(params.frequency_penalty * output.count(token))
        values[token] -= np.float32(params.presence_penalty)
    for token, bias in (params.logit_bias or {}).items():
        values[token] += np.float32(bias)
    if len(output) < params.min_tokens:
        for token in [
            *([] if params.ignore_eos else eos_token_ids),
            *(params.stop_token_ids or []),
        ]:
            values[token] = -np.inf
    return values.tolist()


def _kept(values, weights, params) -> list[int]:
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    order = [i for i in order if weights[i] >= params.min_p]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        needed = params.top_p * sum(weights[i] for i in order)
        kept, mass = [], 0.0
        for i in order:
            kept.append(i)
            mass += weights[i]
            if mass >= needed:
                break
        order = kept
    return order
