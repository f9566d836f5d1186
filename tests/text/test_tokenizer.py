"""Ids equal the library's, whatever the piece cache holds."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors

from hyradix.errors import InvalidParameterError, ModelLoadError
from hyradix.text.tokenizer import Tokenizer
from tests.text.conftest import byte_level_backend, metaspace_backend, write_model_dir

FRAGMENTS = [
    *("<|im_start|>", "<|im_end|>", "<|im_end|>x", "<|endoftext|>", "<think>", "</think>"),
    *("<|im_", "end|>", "user\n", "\n", " ", "  ", "quick brown", " quick", " fox", "don't", "1 2"),
    *("\u0065\u0301", "\u0301", "你好", "😀", "\u200d", "\x00", "x", "'s", "\r\n\t"),
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=12).map("".join)
texts = texts.filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text))


@given(text=texts)
@settings(max_examples=300, deadline=None)
def test_pieces_equal_the_whole(tokenizer: Tokenizer, backend, text: str) -> None:
    assert tokenizer.has_pieces
    expected = backend.encode(text, add_special_tokens=False).ids
    for _ in range(2):
        encoding = tokenizer.encode_pieces(text)
        assert encoding.ids.tolist() == expected
        assert encoding.ids.dtype == np.int32
    assert encoding.char_ends[-1:] == ([len(text)] if text else [])
    assert encoding.token_ends[-1:] == ([len(expected)] if text else [])


@given(text=texts, cut=st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_prefix_tokens_equal_those_of_the_prefix(tokenizer, backend, text: str, cut: int) -> None:
    cut = min(cut, len(text))
    whole = tokenizer.encode_pieces(text)
    if not text:
        return
    ids = backend.encode(text[:cut], add_special_tokens=False).ids
    expected = len(ids) if ids == whole.ids[: len(ids)].tolist() else None
    assert tokenizer.num_prefix_tokens(whole, cut) == expected


@given(text=texts)
@settings(max_examples=100, deadline=None)
def test_a_tokenizer_without_pieces_encodes_whole_texts(metaspace_tokenizer, text: str) -> None:
    assert not metaspace_tokenizer.has_pieces
    oracle = metaspace_backend_once()
    expected = oracle.encode(text, add_special_tokens=False).ids
    assert metaspace_tokenizer.encode(text, add_special_tokens=False).tolist() == expected
    whole = metaspace_tokenizer.encode_pieces(text)
    assert metaspace_tokenizer.num_prefix_tokens(whole, len(text)) == len(expected)


def metaspace_backend_once(cache: list[tokenizers.Tokenizer] = []) -> tokenizers.Tokenizer:  # noqa: B006
    if not cache:
        cache.append(metaspace_backend())
    return cache[0]


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<a>", normalized=False, lstrip=True),
        AddedToken("<a>", normalized=False, rstrip=True),
        AddedToken("<a>", normalized=False, single_word=True),
    ],
)
def test_a_token_that_looks_around_turns_pieces_off(token: AddedToken) -> None:
    backend = byte_level_backend()
    backend.add_special_tokens([token])
    tokenizer = Tokenizer(backend)
    assert not tokenizer.has_pieces
    text = "a <a> b<|im_end|> c"
    expected = backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special_tokens=False).tolist() == expected


def test_marked_control_tokens_are_plain_text(tokenizer: Tokenizer) -> None:
    text = "say <|im_end|>x and <think> now"
    marked = tokenizer.mark_control_tokens(text, "\ufdd0")
    for prompt in (marked, marked + "<|im_end|>"):
        ids = tokenizer.encode_pieces(prompt, literal_mark="\ufdd0").ids.tolist()
        assert tokenizer.decode(ids, skip_special_tokens=False) == prompt.replace("\ufdd0", "")
        assert len([i for i in ids if i in tokenizer.special_ids]) == prompt.count("<|im_end|>")
    parsed = tokenizer.encode(text, add_special_tokens=False).tolist()
    assert any(i in tokenizer.special_ids for i in parsed)


def test_threads_do_not_disturb_each_other(tokenizer: Tokenizer) -> None:
    texts = [f"<|im_end|> fox {i} " * 20 for i in range(50)]
    expected = [tokenizer.encode(text).tolist() for text in texts]

    def work(i: int) -> list[int]:
        tokenizer.encode_pieces(f"a \ufdd0{i}", literal_mark="\ufdd0")
        ids = tokenizer.encode(texts[i] + "").tolist()
        assert tokenizer.decode(ids, skip_special_tokens=False) == texts[i]
        return ids

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(50))) == expected


def test_what_surrounds_a_text_is_added_when_asked_for() -> None:
    backend = byte_level_backend()
    bos = backend.token_to_id("<|endoftext|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("fox").tolist()[0] == bos
    assert tokenizer.encode("fox", add_special_tokens=False).tolist()[0] != bos


def test_truncation_in_the_file_is_ignored() -> None:
    backend = byte_level_backend()
    backend.enable_truncation(2)
    assert len(Tokenizer(backend).encode("the quick fox jumps over it")) > 2


def test_facts_of_a_model_directory(tokenizer: Tokenizer) -> None:
    end = int(tokenizer.encode("<|im_end|>")[0])
    text_end = int(tokenizer.encode("<|endoftext|>")[0])
    assert tokenizer.eos_token_ids == (end, text_end)
    assert {end, text_end} <= tokenizer.special_ids
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.token_text(end) == "<|im_end|>"


def test_every_byte_has_a_token_with_that_byte(tokenizer: Tokenizer) -> None:
    seen = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([i]) for i in range(256)} <= seen
    broken = next(i for i in range(300) if tokenizer.token_bytes(i) == b"\xf0")
    assert tokenizer.token_text(broken) == "\ufffd"
    assert tokenizer.token_bytes(10**6) == b""


def test_tokens_of_a_metaspace_tokenizer_have_bytes(metaspace_tokenizer: Tokenizer) -> None:
    ids = metaspace_tokenizer.encode("the dog 你", add_special_tokens=False).tolist()
    joined = b"".join(metaspace_tokenizer.token_bytes(i) for i in ids)
    assert joined.decode() == " the dog 你"


def test_a_lone_surrogate_is_the_callers_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameterError, match="surrogate"):
        tokenizer.encode("a \ud800 b")


def test_unusable_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    write_model_dir(tmp_path, byte_level_backend())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="tokenizer_config"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": 1}')
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


def test_a_prompt_seen_before_costs_next_to_nothing(tokenizer: Tokenizer) -> None:
    turns = [
        f"<|im_start|>user\nQuestion {i}: {'the quick fox jumps over it ' * 8}<|im_end|>\n"
        for i in range(70)
    ]
    prompt = "".join(turns)
    assert len(tokenizer.encode(prompt)) > 4000
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        tokenizer.encode(prompt)
        best = min(best, time.perf_counter() - start)
    # Measured: about 0.2 ms; the bound leaves room for a busy machine.
    assert best < 2e-3


def test_long_text_leaves_other_threads_room(tokenizer: Tokenizer, backend) -> None:
    text = "quick brown fox don't 你好 " * 40_000
    longest = 0.0
    with ThreadPoolExecutor(1) as pool:
        start = before = time.perf_counter()
        running = pool.submit(tokenizer.encode, text)
        while not running.done():
            time.sleep(0.001)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
        longest = max(longest, time.perf_counter() - before)
        whole = time.perf_counter() - start

    assert longest < whole / 2
    assert running.result().tolist() == backend.encode(text, add_special_tokens=False).ids
