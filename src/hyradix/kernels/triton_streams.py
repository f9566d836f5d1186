"""Launches of which some may run beside others, on a second stream of the device.

Owns: that stream, who waits for whom. Does not know: what is launched.

Invariants:
- What was launched before ``in_turn`` comes before all of its launches, and those before whatever
  comes behind it: callers see one stream.
- The stream has the least priority: where the caller's has more (the runner's has), what runs
  beside takes only what is left of the device.
- Nothing is allocated while the second stream is current.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

Work = Callable[[], object]


def in_turn(makers: Sequence[Work], users: Sequence[Work], device: torch.device) -> None:
    """makers[0], users[0], makers[1], users[1] and so on, as far as results can tell.

    users[i] reads what makers[0..i] left, and no maker touches what users do: on a GPU later makers
    run beside earlier users.
    """
    assert len(makers) == len(users)
    if device.type != "cuda":
        for make, use in zip(makers, users, strict=True):
            make()
            use()
        return
    makers[0]()
    main, side = torch.cuda.current_stream(device), _second_stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        made = []
        for make in makers[1:]:
            make()
            made.append(side.record_event())
    users[0]()
    for event, use in zip(made, users[1:], strict=True):
        main.wait_event(event)
        use()


@lru_cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=0)
