"""C3: a chat of six turns, also with the thinking part of each reply taken out of the history."""

from __future__ import annotations

import pytest

from hyradix.request import Boundary, BoundaryKind
from tests.support.drive import CHUNKS, Driver, cached, text
from tests.support.harness import make_config
from tests.support.tree_view import depths_along

SYSTEM, USER, ASSISTANT, THINK, END = 11, 12, 13, 14, 15
TURNS = 6


class Chat:
    """Renders as a chat template does: a generation prompt that opens a thinking part."""

    def __init__(self, *, keeps_thinking: bool) -> None:
        self.keeps_thinking = keeps_thinking
        self.history = [SYSTEM, *text(900, 70), END]
        self.marks = [Boundary(len(self.history), BoundaryKind.SYSTEM)]
        self.last_user_end = 0

    def ask(self, turn: int) -> tuple[list[int], list[Boundary]]:
        self.marks.append(Boundary(len(self.history), BoundaryKind.TURN))
        self.history += [USER, *text(turn, 37 + turn), END]
        self.last_user_end = len(self.history)
        last = Boundary(self.last_user_end, BoundaryKind.LAST)
        return [*self.history, ASSISTANT, THINK, THINK + 100], [*self.marks, last]

    def answer(self, output: list[int]) -> None:
        if self.keeps_thinking:
            self.history += [ASSISTANT, THINK, THINK + 100, *output, END]
        else:
            self.history += [ASSISTANT, *output[len(output) // 2 :], END]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("keeps_thinking", [True, False])
def test_c3_six_turns(chunk: int, keeps_thinking: bool, overlap: bool) -> None:
    h = Driver(make_config(max_prefill_tokens=chunk, overlap=overlap, track_interval=7))
    chat = Chat(keeps_thinking=keeps_thinking)
    expected = 0
    kept: list[int] = []
    for turn in range(TURNS):
        prompt, marks = chat.ask(turn)
        record = h.serve(prompt, 20 + turn, boundaries=marks)
        assert record.state.num_cached_tokens == expected, f"turn {turn}"
        expected = len(record.tokens) - 1 if keeps_thinking else chat.last_user_end
        kept.append(expected)
        along = depths_along(h.cache.tree, record.tokens)
        earlier = kept if not keeps_thinking else [*kept[:-1], expected]
        assert set(earlier) <= set(along), "earlier checkpoints survive"
        assert 72 in along
        chat.answer(record.output)
    h.close()


@pytest.mark.parametrize("keeps_thinking", [True, False])
def test_c3_two_chats_share_the_system_prompt(keeps_thinking: bool) -> None:
    h = Driver(make_config())
    one, two = Chat(keeps_thinking=keeps_thinking), Chat(keeps_thinking=keeps_thinking)
    prompt, marks = one.ask(1)
    h.serve(prompt, 8, boundaries=marks)
    prompt, marks = two.ask(2)
    record = h.serve(prompt, 8, boundaries=marks)
    assert record.state.num_cached_tokens == 72
    assert cached(record)[1] >= 73, "KV also holds the first token of the user turn"
    h.close()


def test_an_answer_that_is_edited_resumes_before_it() -> None:
    h = Driver(make_config())
    chat = Chat(keeps_thinking=True)
    prompt, marks = chat.ask(1)
    record = h.serve(prompt, 30, boundaries=marks)
    edited = [*prompt, *record.output[:10], 7, 7, 7]
    again = h.serve(edited, 4)
    assert cached(again) == (len(prompt) - 1, len(prompt) + 10)
    assert cached(h.serve([*edited[:-3], 8, 8], 4)) == (len(prompt) + 10, len(prompt) + 10)
    h.close()
