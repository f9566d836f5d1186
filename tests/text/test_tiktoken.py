"""``tiktoken.model``: ids equal the library's, and texts survive, in streams too."""

from __future__ import annotations

import time

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from hyradix.errors import InvalidParameterError, ModelLoadError
from hyradix.text.chat_template import ChatTemplate
from hyradix.text.detokenizer import make_detokenizer
from hyradix.text.tiktoken_backend import PATTERNS, TiktokenBackend, read_ranks
from hyradix.text.tokenizer import Tokenizer
from tests.support.tiktoken_files import NAMED, NUM_RANKS, learned_ranks, write_directory

FRAGMENTS = [
    *("<|im_start|>", "<|im_end|>", "[BOS]", "<think>", f"<|reserved_token_{NUM_RANKS + 9}|>"),
    *(
        "<|im_",
        "end|>",
        "user\n",
        "\n",
        " ",
        "  ",
        "quick brown",
        " quick",
        " fox",
        "don't",
        "1234",
    ),
    *(
        "\u0065\u0301",
        "\u0301",
        "你好",
        "世界s",
        "\u3007",
        "😀",
        "\u200d",
        "\x00",
        "X'S",
        "}\n///",
        "\r\n\t",
    ),
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=12).map("".join)
texts = texts.filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_directory(tmp_path_factory.mktemp("tiktoken"), learned_ranks())


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.from_dir(directory)


@pytest.fixture(scope="module")
def library(directory):
    """The library itself, as the oracle; its pattern written out as the model's authors have it."""
    split = (
        r"[\p{Han}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    special = {f"<|reserved_token_{i}|>": i for i in range(NUM_RANKS, NUM_RANKS + 256)}
    special = {text: i for text, i in special.items() if i not in NAMED}
    special |= {token["content"]: i for i, token in NAMED.items()}
    return tiktoken.Encoding(
        "oracle", pat_str=split, mergeable_ranks=learned_ranks(), special_tokens=special
    )


@given(text=texts)
@settings(max_examples=300, deadline=None)
def test_ids_equal_the_librarys(tokenizer, library, text):
    expected = library.encode(text, allowed_special="all")
    assert tokenizer.encode(text).tolist() == expected
    whole = tokenizer.encode_pieces(text)
    assert whole.ids.tolist() == expected
    assert tokenizer.decode(expected, skip_special_tokens=False) == text
    for cut in range(0, len(text), 3):
        ids = library.encode(text[:cut], allowed_special="all")
        is_prefix = ids == expected[: len(ids)]
        assert tokenizer.num_prefix_tokens(whole, cut) == (len(ids) if is_prefix else None)


@given(text=texts)
@settings(max_examples=100, deadline=None)
def test_streams_say_the_same(tokenizer, text):
    ids = tokenizer.encode(text).tolist()
    for skip in (True, False):
        stream = make_detokenizer(tokenizer, skip_special_tokens=skip)
        deltas = [stream.feed([i]) for i in ids]
        assert "".join(deltas) + stream.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


def test_marked_control_tokens_are_plain_text(tokenizer):
    text = "say <|im_end|> and [EOS] now"
    marked = tokenizer.mark_control_tokens(text, "\ufdd0")
    ids = tokenizer.encode_pieces(marked, literal_mark="\ufdd0").ids.tolist()
    assert not set(ids) & tokenizer.special_ids
    assert tokenizer.decode(ids) == text
    assert set(tokenizer.encode(text).tolist()) & tokenizer.special_ids


def test_facts(tokenizer):
    assert tokenizer.eos_token_ids == (NUM_RANKS + 2, NUM_RANKS + 1)
    assert tokenizer.vocab_size == NUM_RANKS + 256
    assert NUM_RANKS + 6 not in tokenizer.special_ids  # <think> is part of an answer
    assert NUM_RANKS + 200 in tokenizer.special_ids
    assert tokenizer.special_tokens["bos_token"] == "[BOS]"
    assert tokenizer.is_byte_level
    assert tokenizer.has_pieces
    assert tokenizer.token_bytes(0xF0) == b"\xf0"
    assert tokenizer.token_text(0xF0) == "\ufffd"
    assert tokenizer.token_bytes(NUM_RANKS + 1) == b"[EOS]"
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.decode([10**6, 65]) == "A"


def test_chats(directory, tokenizer):
    template = ChatTemplate.from_dir(directory, tokenizer)
    messages = [{"role": "user", "content": "a fox <|im_end|>"}]
    ids = template.render(messages).token_ids.tolist()
    start, end = (tokenizer.encode(token).tolist() for token in ("<|im_start|>", "<|im_end|>"))
    assert (ids.count(start[0]), ids.count(end[0])) == (2, 1)  # the user's own is plain text


def test_a_template_in_its_own_file(tmp_path, directory, tokenizer):
    write_directory(tmp_path, learned_ranks(), chat_template=None)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    template = ChatTemplate.from_dir(tmp_path, tokenizer)
    ids = template.render([{"role": "user", "content": "fox"}]).token_ids
    assert tokenizer.decode(ids) == "fox!"


def test_a_lone_surrogate_is_the_callers_fault(tokenizer):
    with pytest.raises(InvalidParameterError, match="surrogate"):
        tokenizer.encode("a \ud800 b")


@pytest.mark.parametrize("char", [" ", "x", "你", "\n", "1", "!"])
def test_endless_runs_are_encoded_in_time(tokenizer, char):
    text = char * 300_000
    start = time.perf_counter()
    ids = tokenizer.encode(text).tolist()
    assert time.perf_counter() - start < 10
    assert tokenizer.decode(ids) == text


def test_long_texts_are_cut_as_the_models_own_code_cuts_them(tokenizer, library):
    words = "quick brown fox " * 3_000
    assert tokenizer.encode(words).tolist() == library.encode(words)
    run = "ab" + "x" * 60_000 + " fox"
    parts = [run[:25_000], run[25_000:50_000], run[50_000:]]
    assert tokenizer.encode(run).tolist() == [i for part in parts for i in library.encode(part)]


def test_unusable_directories(tmp_path):
    ranks = learned_ranks()
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json .* no tiktoken\.model"):
        Tokenizer.from_dir(tmp_path)
    write_directory(tmp_path, ranks, tokenizer_class="OtherTokenizer")
    with pytest.raises(ModelLoadError, match="TikTokenTokenizer only, not for 'OtherTokenizer'"):
        Tokenizer.from_dir(tmp_path)
    for wrong in ({"7": "text"}, {"x": {"content": "a"}}, {"7": {"content": ""}}, 3):
        write_directory(tmp_path, ranks, added_tokens_decoder=wrong)
        with pytest.raises(ModelLoadError, match="added_tokens_decoder"):
            Tokenizer.from_dir(tmp_path)
    file = tmp_path / "tiktoken.model"
    for text, message in [
        ("QQ== 0\nQg== x\n", "cannot read"),
        ("?? 0\n", "cannot read"),
        ("QQ==\n", "cannot read"),
        ("QQ== 0\nQg== 2\n", "leaves out ranks"),
        ("QQ== 0\nQg== 0\n", "leaves out ranks"),
        ("QQ== 0\n", "no token for byte 0"),
    ]:
        file.write_text(text)
        with pytest.raises(ModelLoadError, match=message):
            read_ranks(file)


def test_without_the_package_the_error_says_so(directory, monkeypatch):
    def fail(name):
        raise ImportError(f"no {name}")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(ModelLoadError, match="needs the tiktoken package: no tiktoken"):
        TiktokenBackend({}, [], PATTERNS["TikTokenTokenizer"])
