"""The offline engine on the demo model: the names vLLM's users know, and what they promise."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hyradix import LLM, SamplingParams
from hyradix.errors import (
    CapacityError,
    ConfigError,
    ContextLengthError,
    InvalidParameterError,
    ModelLoadError,
)

pytestmark = pytest.mark.slow
OPTIONS = {"use_tqdm": False, "kv_slots": 20_000, "states": 60, "num_threads": 1}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", **OPTIONS)


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **options})


def test_prompts_come_in_every_form(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The sea is").tolist()
    forms = ["The sea is", ids, {"prompt": "The sea is"}, {"prompt_token_ids": ids}]
    results = llm.generate(forms, greedy(), use_tqdm=False)
    assert [r.prompt_token_ids for r in results] == [ids] * 4
    assert len({tuple(r.outputs[0].token_ids) for r in results}) == 1
    assert results[0].prompt == "The sea is"
    alone = llm.generate(ids, greedy(), use_tqdm=False)
    assert alone[0].outputs[0].token_ids == results[0].outputs[0].token_ids
    assert alone[0].outputs[0].finish_reason == "length"
    assert llm.generate([], greedy(), use_tqdm=False) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [greedy(max_tokens=2), greedy(max_tokens=5)]
    results = llm.generate(["One", "Two"], params, use_tqdm=False)
    assert [len(r.outputs[0].token_ids) for r in results] == [2, 5]
    with pytest.raises(InvalidParameterError):
        llm.generate(["One"], params, use_tqdm=False)


def test_a_chat_resumes_at_the_end_of_the_reply(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is a library?"}]
    first = llm.chat(messages, greedy(max_tokens=60), use_tqdm=False)[0]
    assert first.outputs[0].finish_reason == "stop"
    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "Thank you!"},
    ]
    second = llm.chat(messages, greedy(), use_tqdm=False)[0]
    told = first.prompt_token_ids + first.outputs[0].token_ids
    assert second.prompt_token_ids[: len(told)] == told
    assert second.num_cached_tokens >= len(told) - 1


def test_seeds_decide_and_neighbours_do_not(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    alone = llm.generate(["Once"], params, use_tqdm=False)[0].outputs[0].token_ids
    crowd = llm.generate(["Once", "Two", "Three", "Once"], params, use_tqdm=False)
    assert crowd[0].outputs[0].token_ids == alone
    assert crowd[3].outputs[0].token_ids == alone
    several = llm.generate(
        ["Once"],
        SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True, n=3),
        use_tqdm=False,
    )[0]
    assert several.outputs[0].token_ids == alone
    assert len({tuple(o.token_ids) for o in several.outputs}) == 3
    assert [o.index for o in several.outputs] == [0, 1, 2]


def test_stop_strings_cut_the_text(llm: LLM) -> None:
    whole = llm.generate(["The sea is"], greedy(max_tokens=24), use_tqdm=False)[0].outputs[0]
    word = whole.text.split()[3]
    cut = llm.generate(["The sea is"], greedy(max_tokens=24, stop=word), use_tqdm=False)[0]
    assert cut.outputs[0].text == whole.text[: whole.text.index(word)]
    assert cut.outputs[0].finish_reason == "stop"
    assert cut.outputs[0].stop_reason == word
    token = whole.token_ids[2]
    stopped = llm.generate(
        ["The sea is"], greedy(max_tokens=24, stop_token_ids=[token]), use_tqdm=False
    )[0].outputs[0]
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert stopped.stop_reason == token


def test_logprobs_are_mappings_of_the_raw_distribution(llm: LLM) -> None:
    result = llm.generate(
        ["The sea is blue"], greedy(logprobs=3, prompt_logprobs=2), use_tqdm=False
    )[0]
    reply = result.outputs[0]
    assert reply.logprobs is not None
    assert len(reply.logprobs) == len(reply.token_ids)
    for token, position in zip(reply.token_ids, reply.logprobs, strict=True):
        assert position[token].rank == 1
        assert len(position) == 3
        assert sum(math.exp(entry.logprob) for entry in position.values()) <= 1.0001
    assert reply.cumulative_logprob == pytest.approx(
        sum(p[t].logprob for t, p in zip(reply.token_ids, reply.logprobs, strict=True))
    )
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    assert result.prompt_logprobs[0] is None
    for token, entry in zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert token in entry
    again = llm.generate(["The sea is blue"], greedy(prompt_logprobs=2), use_tqdm=False)[0]
    assert again.prompt_logprobs == result.prompt_logprobs
    assert again.num_cached_tokens == 0


def test_streams_bring_deltas_and_may_be_closed(llm: LLM) -> None:
    whole = llm.generate(["The sea is"], greedy(), use_tqdm=False)[0].outputs[0]
    deltas = list(llm.stream("The sea is", greedy()))
    assert "".join(d.text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert deltas[-1].is_finished
    stream = llm.stream("The sea is", greedy(max_tokens=1000))
    next(stream)
    stream.close()
    assert llm.stats().num_running == 0
    stats = llm.stats()
    assert stats.kv.held == 0
    assert stats.state.held == 0


def test_open_streams_lose_nothing_to_each_other_or_to_a_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    alone = llm.generate([[5, 9, 11], [7, 3]], params)

    first, second, closed = (llm.stream(ids, params) for ids in ([5, 9, 11], [7, 3], [8]))
    tokens = [list(next(first).token_ids), list(next(second).token_ids)]
    next(closed)
    closed.close()
    llm.generate([4, 4], params)
    tokens[1] += [token for output in second for token in output.token_ids]
    tokens[0] += [token for output in first for token in output.token_ids]

    assert tokens == [list(result.outputs[0].token_ids) for result in alone]
    assert llm.stats().state.held == 0


def test_nothing_stays_held_after_a_stop_string_with_overlap() -> None:
    llm = LLM("demo", **OPTIONS, overlap=True)
    params = greedy(stop=["e"], max_tokens=64)

    result = llm.generate("Once upon a time", params)[0]

    assert result.outputs[0].finish_reason == "stop"
    assert llm.stats().state.held == llm.stats().kv.held == 0
    list(llm.stream("Once upon a time", params))
    assert llm.stats().state.held == llm.stats().kv.held == 0


def test_bad_requests_are_refused_and_cost_nobody_anything(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="8192"):
        llm.generate([[300] * 8192], greedy(), use_tqdm=False)
    for prompt in ("", [], [-1], [10**6], [1.5]):
        with pytest.raises(InvalidParameterError):
            llm.generate([prompt], greedy(), use_tqdm=False)
    with pytest.raises(InvalidParameterError):
        llm.generate(["fine", [9999]], greedy(), use_tqdm=False)
    with pytest.raises(InvalidParameterError):
        llm.generate(["fine"], greedy(top_p=0.0), use_tqdm=False)
    assert not llm.engine.has_work()
    assert llm.generate(["fine"], greedy(), use_tqdm=False)[0].outputs[0].token_ids


def test_what_can_never_fit_is_refused_with_numbers() -> None:
    small = LLM("demo", use_tqdm=False, kv_slots=64, states=4, max_requests=2, num_threads=1)
    with pytest.raises(CapacityError, match=r"90 KV slots.*64"):
        small.generate([[300] * 50], greedy(max_tokens=40), use_tqdm=False)
    assert small.generate([[300] * 50], greedy(), use_tqdm=False)[0].outputs[0].token_ids


def test_warm_up_prompts_are_hit_at_their_exact_end(tmp_path: Path) -> None:
    system = "You answer in one short sentence. " * 6
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([[{"role": "system", "content": system}]]))
    options = {**OPTIONS, "warmup_prompts_file": str(path)}
    warm = LLM("demo", **options, pin=True)
    rendered = warm.chat_template.render(
        [{"role": "system", "content": system}], add_generation_prompt=False
    )
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello!"}]
    result = warm.chat(messages, greedy(), use_tqdm=False)[0]
    assert result.num_cached_tokens == len(rendered.token_ids)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="list"):
        LLM("demo", **options)


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="no_such_option"):
        LLM("demo", no_such_option=1, **OPTIONS)
    with pytest.raises(ModelLoadError, match="neither a directory nor a hub name"):
        LLM("./nowhere", **OPTIONS)


def test_bfloat16_weights_run(llm: LLM) -> None:
    half = LLM("demo", dtype="bfloat16", **OPTIONS)
    messages = [{"role": "user", "content": "What is a dog?"}]
    assert half.chat(messages, greedy(max_tokens=40), use_tqdm=False)[0].outputs[0].text
