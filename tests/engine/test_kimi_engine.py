"""Kimi's directories as they are released, ``tiktoken.model`` and all: chats resume, with text.

Outputs with cache, log and drafts: ``tests/oracles/test_family_schedules.py``.
"""

from __future__ import annotations

import json

import pytest
from safetensors.torch import save_file

from hyradix import LLM, SamplingParams
from hyradix.models.loader import init_random, load_config
from tests.support.kimi_checkpoints import kimi_config
from tests.support.tiktoken_files import NUM_RANKS, learned_ranks, write_directory

pytestmark = pytest.mark.slow
OPTIONS = {"use_tqdm": False, "kv_slots": 2_000, "states": 40, "num_threads": 1,
           "max_requests": 4, "max_context": 512}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Weights so large that no two logits tie, and that nothing is said twice."""
    path = write_directory(tmp_path_factory.mktemp("kimi"), learned_ranks())
    raw = {**kimi_config("kimi_linear"), "vocab_size": NUM_RANKS + 256}
    (path / "config.json").write_text(json.dumps(raw))
    tensors = init_random(load_config(path))
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and not name.endswith("A_log"):
            tensor.mul_(8.0)
    save_file(tensors, path / "model.safetensors")
    return path


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
    (cold,) = LLM(str(directory), **OPTIONS, prefix_cache=False).chat(
        messages, params, use_tqdm=False
    )
    assert cold.outputs[0].token_ids == second.outputs[0].token_ids
