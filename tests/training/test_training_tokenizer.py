"""The tokenizer script on a tiny corpus, and the chat template."""

from __future__ import annotations

import gzip
import sys
from itertools import pairwise
from pathlib import Path

import corpus
import pytest
import train_tokenizer
from chat_format import CHAT_TEMPLATE, SPECIAL_TOKENS, TURN_END, render_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

TINY_VOCAB = len(SPECIAL_TOKENS) + 256 + 40

contents = st.text(max_size=40) | st.sampled_from(["", " ", "\n", "<|im_end|>", "{{ x }}"])
turns = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": contents})
chats = st.tuples(
    st.lists(st.fixed_dictionaries({"role": st.just("system"), "content": contents}), max_size=1),
    st.lists(turns, min_size=1, max_size=5),
).map(lambda parts: parts[0] + parts[1])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the script writes for a vocabulary of 312 and a corpus of one short file."""
    folder = tmp_path_factory.mktemp("tokenizer")
    with gzip.open(folder / "text_standardebooks_cc0.txt.gz", "wt", encoding="utf-8") as file:
        file.write("<|doc|>".join(["It was the best of times, it was the worst of times."] * 9))
    arguments = ["train_tokenizer.py", "--corpus", str(folder), "--out", str(folder / "out")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_tokenizer, "VOCAB_SIZE", TINY_VOCAB)
        patch.setattr(corpus, "NUM_HANDMADE", 100)
        patch.setattr(sys, "argv", arguments)
        train_tokenizer.main()
    return folder / "out"


@pytest.fixture(scope="module", params=["tiny", "shipped"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def chat_tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


def test_special_tokens_come_first_and_sizes_are_exact(tiny: Path):
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert [tokenizer.id_to_token(i) for i in range(len(SPECIAL_TOKENS))] == SPECIAL_TOKENS
    assert tokenizer.get_vocab_size() == TINY_VOCAB


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.binary(max_size=60).map(lambda b: b.decode("utf-8", "replace")))
def test_any_utf8_text_comes_back(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_code_point_comes_back(tokenizer: Tokenizer):
    points = [chr(p) for p in range(0x110000) if not 0xD800 <= p < 0xE000]
    text = "".join(points[::37])
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_digit_is_its_own_token(tokenizer: Tokenizer):
    assert tokenizer.encode("20480").tokens == list("20480")


@settings(max_examples=100, deadline=None)
@given(chat=chats)
def test_template_is_prefix_stable(chat_tokenizer, chat: list[dict[str, str]]):
    def render(messages: list[dict[str, str]], prompt: bool = False) -> str:
        return chat_tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )

    texts = [render(chat[: n + 1]) for n in range(len(chat))]
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))
    assert texts[-1] == "".join(text for text, _ in render_parts(chat))
    for n, message in enumerate(chat):
        if n and message["role"] == "assistant":
            reply = f"{message['content']}{TURN_END}\n"
            assert texts[n] == render(chat[:n], prompt=True) + reply
    ids = [chat_tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(ids))


def test_template_takes_content_in_parts(chat_tokenizer):
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]
    whole, split = (
        chat_tokenizer.apply_chat_template([{"role": "user", "content": c}], tokenize=False)
        for c in ("Hello there", parts)
    )
    assert whole == split


def test_shipped_template_is_this_one(shipped: Path):
    assert (shipped / "chat_template.jinja").read_text().strip() == CHAT_TEMPLATE.strip()
