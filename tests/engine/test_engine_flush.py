"""/flush_cache is for whoever has an answer: what is left of a complete reply is waited for."""

from __future__ import annotations

import pytest

from hyradix.engine.engine import Engine
from hyradix.request import Request, SamplingParams
from tests.support.demo import DemoEngines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engines() -> DemoEngines:
    return DemoEngines()


def add(engine: Engine, name: str, max_tokens: int) -> None:
    request = Request(
        request_id=name,
        prompt_token_ids=b"".join(i.to_bytes(4, "little") for i in range(300, 330)),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
        seed=0,
    )
    assert engine.add(request) is None


def run_until_finished(engine: Engine, name: str) -> None:
    for _ in range(100):
        for output in engine.step():
            if output.request_id == name and output.finish_reason is not None:
                return
    raise AssertionError("no end")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("decode_log", [0, 8])
def test_a_complete_reply_does_not_hold_up_a_flush(
    engines: DemoEngines, decode_log: int, overlap: bool
) -> None:
    engine = engines.make(decode_log=decode_log, overlap=overlap)
    add(engine, "one", 6)
    run_until_finished(engine, "one")
    assert engine.scheduler.has_work == (decode_log > 0), "its state is not folded yet"
    assert engine.flush_cache()
    assert engine.scheduler.cache.tree.num_tokens == 0
    assert not engine.has_work()


def test_a_running_request_does(engines: DemoEngines) -> None:
    engine = engines.make(decode_log=8)
    add(engine, "one", 6)
    add(engine, "two", 30)
    run_until_finished(engine, "one")
    assert not engine.flush_cache()
    run_until_finished(engine, "two")
    assert engine.flush_cache()


def test_what_an_abort_left_is_still_delivered(engines: DemoEngines) -> None:
    engine = engines.make(decode_log=8)
    add(engine, "one", 30)
    for _ in range(5):
        engine.step()
    engine.abort("one")
    assert engine.flush_cache()
    (output,) = engine.step()
    assert output.finish_reason == "abort"
    assert not engine.has_work()
