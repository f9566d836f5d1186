"""C1, C2, C3, C5, C8, C10, C20 where the state is real: a tiny model of each recurrence.

The other tests of these scenarios see which slots are used, with a data plane that is a hash; here
the tokens come out of GDN, Mamba2 and KDA, so they show whether what was kept is exact. On a GPU
(``-m gpu``) by the runners that serve there; in the interpreter: ``tests/gpu``.
"""

from __future__ import annotations

import pytest

from tests.conformance.real_models import WAYS, Judged, Served, branching, preempted, text
from tests.support.tiny_engines import RECURRENCES, make_engines

pytestmark = pytest.mark.slow
ways = pytest.mark.parametrize("way", WAYS)
ON_GPU = [pytest.param(f"{name} cuda", marks=pytest.mark.gpu) for name in RECURRENCES]


@pytest.fixture(scope="module", params=[*RECURRENCES, *ON_GPU])
def served(request, tmp_path_factory) -> Judged:
    recurrence, _, device = request.param.partition(" ")
    directory = tmp_path_factory.mktemp(recurrence)
    return Judged(make_engines(RECURRENCES[recurrence], directory, device=device or "cpu"))


@ways
@pytest.mark.parametrize("chunk", [16, 0])
def test_c1_c10_resuming_where_no_chunk_ends(served, way: str, chunk: int) -> None:
    s = Served(served, WAYS[way], max_prefill_tokens=chunk)
    for n in (47, 48, 49, 64, 65, 70):
        prompt = text(n, n)
        ((_, cached),) = s.replies(prompt)
        assert cached == 0
        ((_, cached),) = s.replies(prompt)
        assert cached == n - 1
    s.close()


@ways
@pytest.mark.parametrize("chunk", [16, 0])
def test_c2_the_third_resumes_where_the_first_two_part(served, way: str, chunk: int) -> None:
    branching(Served(served, WAYS[way], max_prefill_tokens=chunk))


@ways
def test_c3_c20_the_next_turn_resumes_at_the_replys_end(served, way: str) -> None:
    """Replies end at every place of a round: of each length from 20 on."""
    s = Served(served, WAYS[way])
    for length in range(20, 26):
        conversation, end = text(100 + length, 40), 0
        for turn in range(3):
            ((reply, cached),) = s.replies(conversation, max_tokens=length)
            assert cached == end
            conversation = conversation + reply
            end = len(conversation) - 1  # the last token was sampled, not consumed
            conversation = conversation + text(200 + turn, 9)
    s.close()


@ways
def test_c5_tracks_inside_accepted_runs(served, way: str) -> None:
    """A track at every third token; the one before a cut is where a shorter prefix resumes."""
    s = Served(served, WAYS[way], track_interval=3, min_gain=0, force_preempt_every=5)
    for number in range(3):
        prompt = text(300 + number, 35)
        ((reply, _),) = s.replies(prompt)
        whole = prompt + reply
        for cut in (len(prompt) + 5, len(prompt) + 10, len(prompt) + 17):
            s.replies(whole[:cut] + text(cut, 6))
    s.close()


@ways
@pytest.mark.parametrize("donate", ["always", "never"])
def test_c8_preempted_and_resumed(served, way: str, donate: str) -> None:
    options = {"force_preempt_every": 3, "preempt_donate": donate, "max_prefill_tokens": 16}
    preempted(Served(served, WAYS[way], **options))
