"""Detokenizer, stop strings, output stream and parser, cut at every boundary."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyradix.request import SamplingParams
from hyradix.text.detokenizer import make_detokenizer
from hyradix.text.output_stream import OutputStream
from hyradix.text.parsers import ParsedText, ReasoningParser
from hyradix.text.stop import StopMatcher
from hyradix.text.tokenizer import Tokenizer


def cuts(items, where: int):
    """``items`` in two pieces."""
    return items[:where], items[where:]


# ---- detokenizer ---------------------------------------------------------------------------------


@given(ids=st.lists(st.integers(0, 520), max_size=30), skips=st.booleans())
@settings(max_examples=300, deadline=None)
def test_deltas_make_up_the_whole(tokenizer: Tokenizer, ids: list[int], skips: bool) -> None:
    # Arbitrary ids: invalid and unfinished UTF-8, special tokens, ids without a text.
    expected = tokenizer.decode(ids, skip_special_tokens=skips)
    for where in range(len(ids) + 1):
        stream = make_detokenizer(tokenizer, skip_special_tokens=skips)
        emitted = ""
        for part in cuts(ids, where):
            emitted += stream.feed(part)
            assert expected.startswith(emitted)
        assert emitted + stream.finish() == expected


@given(text=st.text(alphabet="aé你😀\u200d \n\u0301", max_size=20))
@settings(max_examples=100, deadline=None)
def test_no_half_character_is_emitted(tokenizer: Tokenizer, text: str) -> None:
    stream = make_detokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    deltas = [stream.feed([i]) for i in ids]
    assert "\ufffd" not in "".join(deltas)
    assert stream.finish() == ""


@given(text=st.text(alphabet="the dogé你😀\n", max_size=20))
@settings(max_examples=100, deadline=None)
def test_window_detokenizer(metaspace_tokenizer: Tokenizer, text: str) -> None:
    ids = metaspace_tokenizer.encode(text, add_special_tokens=False).tolist()
    expected = metaspace_tokenizer.decode(ids)
    stream = make_detokenizer(metaspace_tokenizer)
    deltas = [stream.feed([i]) for i in ids]
    assert "".join(deltas) + stream.finish() == expected
    assert "\ufffd" not in "".join(deltas)


# ---- stop strings --------------------------------------------------------------------------------


def one_shot(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The match that is complete first, of several the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@given(
    text=st.text(alphabet="ab", max_size=16),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4),
    include_stop=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_stop_strings_do_not_depend_on_the_cuts(text, stops, include_stop) -> None:
    expected = one_shot(text, stops, include_stop)
    for parts in [cuts(text, where) for where in range(len(text) + 1)] + [tuple(text)]:
        matcher = StopMatcher(stops, include_stop=include_stop)
        emitted, matched = "", None
        for part in parts:
            delta, matched = matcher.feed(part)
            emitted += delta
            assert expected[0].startswith(emitted)
        if matched is None:
            emitted += matcher.finish()
        assert (emitted, matched) == expected


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(["stop", "top it"])
    assert matcher.feed("please st") == ("please ", None)
    assert matcher.feed("ay to") == ("stay ", None)
    assert matcher.feed("p i") == ("", None)
    assert matcher.finish() == "top i"
    assert StopMatcher([]).feed("anything") == ("anything", None)


# ---- output stream -------------------------------------------------------------------------------


def stream_of(tokenizer: Tokenizer, **params) -> OutputStream:
    return OutputStream(tokenizer, SamplingParams(max_tokens=None, **params))


@given(
    text=st.text(alphabet="abé你 \n", min_size=1, max_size=20),
    stops=st.lists(st.text(alphabet="abé你 \n", min_size=1, max_size=3), max_size=3),
    include_stop=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_the_token_that_completes_a_stop_string_is_the_last_kept(
    tokenizer: Tokenizer, text, stops, include_stop
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    expected, stop = one_shot(tokenizer.decode(ids), stops, include_stop)
    kept = len(ids)
    if stop is not None:
        kept = next(
            n for n in range(len(ids) + 1) if one_shot(tokenizer.decode(ids[:n]), stops, False)[1]
        )
    for where in range(len(ids) + 1):
        stream = stream_of(tokenizer, stop=stops, include_stop_str_in_output=include_stop)
        emitted, num_kept, matched = "", 0, None
        for part in cuts(ids, where):
            step = stream.feed(part)
            emitted += step.text
            num_kept += len(part) if step.num_kept_tokens is None else step.num_kept_tokens
            if step.stop_string is not None:
                matched = step.stop_string
                break
        emitted += stream.finish()
        assert (emitted, num_kept, matched) == (expected, kept, stop)


def test_the_text_of_the_ending_token_is_left_out(tokenizer: Tokenizer) -> None:
    fox, dog, end = (int(tokenizer.encode(t)[0]) for t in (" fox", " dog", "<|im_end|>"))
    assert stream_of(tokenizer).feed(
        [fox, dog], is_ended_by_last=True
    ).text == tokenizer.token_text(fox)
    shown = stream_of(tokenizer, skip_special_tokens=False)
    assert shown.feed([end, end], is_ended_by_last=True).text == "<|im_end|>"
    kept = stream_of(tokenizer, include_stop_str_in_output=True)
    assert kept.feed([fox], is_ended_by_last=True).text == tokenizer.token_text(fox)


def test_held_text_comes_out_when_the_request_ends_by_a_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\n<|im_end|>").tolist()
    stream = stream_of(tokenizer, stop="\n\n")
    assert stream.feed(ids, is_ended_by_last=True).text == "a"
    assert stream.finish() == "\n"


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("1 2 1 2 1 2", add_special_tokens=False).tolist()
    assert len(ids) == 11
    stream = stream_of(tokenizer, stop="2", min_tokens=5)
    step = stream.feed(ids)
    assert (step.text, step.num_kept_tokens) == ("1 2 1 ", 7)


# ---- reasoning -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nhm < a</think>\n\nyes", False, ParsedText("hm < a", "yes")),
        (" \n<think>hm</think>yes</think>", False, ParsedText("hm", "yes</think>")),
        ("no <think>hm</think>", False, ParsedText("", "no <think>hm</think>")),
        (" <thin", False, ParsedText("", " <thin")),
        ("\nhm</think>\nyes\n", True, ParsedText("hm", "yes\n")),
        ("hm</thi", True, ParsedText("hm</thi", "")),
        ("", False, ParsedText("", "")),
    ],
)
def test_reasoning_is_split_off(text: str, inside: bool, expected: ParsedText) -> None:
    for parts in [cuts(text, where) for where in range(len(text) + 1)] + [tuple(text)]:
        parser = ReasoningParser(starts_inside=inside)
        deltas = [*(parser.feed(part) for part in parts), parser.finish()]
        reasoning = "".join(delta.reasoning for delta in deltas)
        assert ParsedText(reasoning, "".join(delta.content for delta in deltas)) == expected
