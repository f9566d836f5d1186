"""The whole engine on a tiny ``kimi_linear``: outputs do not depend on the cache, chats resume."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.torch import save_file

from hyradix import LLM, SamplingParams
from hyradix.models.loader import init_random, load_config
from tests.support.kimi_checkpoints import kimi_config
from tests.support.tiktoken_files import NUM_RANKS, learned_ranks, write_directory

pytestmark = pytest.mark.slow
OPTIONS = {"use_tqdm": False, "kv_slots": 2_000, "states": 40, "num_threads": 1,
           "max_requests": 4, "max_context": 512}  # fmt: skip


def write_model(path, scale):
    write_directory(path, learned_ranks())
    raw = {**kimi_config("kimi_linear"), "vocab_size": NUM_RANKS + 256}
    (path / "config.json").write_text(json.dumps(raw))
    tensors = init_random(load_config(path))
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and not name.endswith("A_log"):
            tensor.mul_(scale)
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Weights so large that no two logits tie, and that nothing is said twice."""
    return write_model(tmp_path_factory.mktemp("kimi"), 8.0)


@pytest.fixture(scope="module")
def cold(directory):
    """What each prompt gives alone, in an engine of its own."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    found = []
    for prompt in prompts():
        (result,) = LLM(str(directory), **OPTIONS).generate([prompt], params, use_tqdm=False)
        found.append(result.outputs[0].token_ids)
    return found


def prompts():
    rng = np.random.default_rng(0)
    shared = rng.integers(0, NUM_RANKS, 90).tolist()
    return [shared[:n] + rng.integers(0, NUM_RANKS, 30).tolist() for n in (90, 90, 40, 90, 64)]


def outputs(llm, max_tokens=24):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [
        (r.outputs[0].token_ids, r.num_cached_tokens)
        for r in llm.generate(prompts(), params, use_tqdm=False)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_prefill_tokens": 17},
        {"overlap": False, "states": 12, "force_preempt_every": 5},
        {"decode_log": 8},
    ],
)
def test_outputs_do_not_depend_on_the_cache(directory, cold, options):
    llm = LLM(str(directory), **{**OPTIONS, **options})
    first, second = outputs(llm), outputs(llm)
    assert [tokens for tokens, _ in first] == cold
    assert [tokens for tokens, _ in second] == cold
    assert any(num_cached > 0 for _, num_cached in second)


def test_chats_resume_and_answers_have_text(directory):
    llm = LLM(str(directory), **OPTIONS)
    messages = [{"role": "user", "content": "the quick fox 你好"}]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (first,) = llm.chat(messages, params, use_tqdm=False)
    text = llm.tokenizer.decode(first.outputs[0].token_ids)
    assert first.outputs[0].text == text
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
    (second,) = llm.chat(messages, params, use_tqdm=False)
    assert second.num_cached_tokens >= 10


def test_drafts_are_accepted_and_change_nothing(tmp_path):
    """A model that repeats itself."""
    write_model(tmp_path, 1.0)
    repeating = [([5, 9, 7, 30, 41, 8] * 8)[: 40 + i] for i in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    tree = {"spec_topk": 2, "spec_steps": 4, "spec_nodes": 9}
    found = []
    for options in (
        {},
        {"spec": "ngram", "spec_state": "snapshot", "spec_steps": 4},
        {"spec": "ngram", "spec_state": "replay", **tree},
        {"spec": "ngram", "spec_state": "log", **tree},
    ):
        llm = LLM(str(tmp_path), **OPTIONS, overlap=False, **options)
        results = llm.generate(repeating, params, use_tqdm=False)
        found.append([result.outputs[0].token_ids for result in results])
        assert (llm.stats().num_accepted_tokens > 10) == bool(options)
    assert found == [found[0]] * 4
