"""Random schedules: arrivals, steps in flight, aborts, over pools of any (small) size.

``World(rng)`` draws its own settings; ``walk`` performs operations, each of which ends in
``check()``. One random source drives everything, so hypothesis can shrink it and a seed repeats it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random

from hyradix.errors import CapacityError, ContextLengthError
from hyradix.request import Boundary, BoundaryKind
from tests.support.drive import EOS, Driver, reply, small_vocab
from tests.support.harness import Record

VOCAB = 23
FAMILIES = 3


def family_token(family: int, position: int) -> int:
    """The endless text of a family; never end-of-sequence."""
    return 2 + (family * 7919 + position * 31 + (position * position) % 13) % (VOCAB - 2)


class World:
    """See the module's docstring. ``seen`` counts what happened."""

    def __init__(self, rng: Random, **fixed: object) -> None:
        self.rng = rng
        self.seen: Counter[str] = Counter()
        config = small_vocab(VOCAB, **self._options(fixed))
        self.harness = Driver(config, seed=rng.randrange(1 << 30))
        self.ahead = rng.choice([1, 1, 2, 3]) if self.harness.config.overlap else 0
        self._count_splits()

    def _options(self, fixed: dict[str, object]) -> dict[str, object]:
        pick = self.rng.choice
        max_requests = pick([1, 2, 3, 5])
        max_context = pick([24, 48, 80])
        options = {
            "max_requests": max_requests,
            "max_context": max_context,
            "kv_slots": max_context + pick([0, 0, 1, 7, 40, 150]),
            "states": max_requests + pick([0, 0, 1, 2, 4, 12]),
            "max_prefill_tokens": pick([0, 0, 1, 7, 16]),
            "track_interval": pick([0, 1, 4, 8]),
            "min_gain": pick([0, 1, 8, 32]),
            "max_checkpoints": pick([1, 2, 16]),
            "prefix_cache": pick([True] * 7 + [False]),
            "overlap": pick([False, True]),
            "force_preempt_every": pick([0, 0, 0, 2, 3, 7]),
            "preempt_donate": pick(["always", "never"]),
            "order": pick(["fcfs", "longest_prefix"]),
        }
        return {**options, **self._draft_options(options), **fixed}

    def _draft_options(self, options: dict[str, object]) -> dict[str, object]:
        """Drafts of any shape, kept in any way; the log alone; or (most often) neither."""
        pick = self.rng.choice
        kind = pick(["off", "off", "off", "decode log", "chain", "chain", "tree", "tree"])
        rounds = 2 if options["overlap"] else 1
        if kind == "off":
            return {}
        if kind == "decode log":
            return {"decode_log": pick([rounds, 3, 16])}
        steps = pick([1, 2, 3, 6])
        drafts: dict[str, object] = {
            "spec": pick(["ngram", "mtp", "frozen_kv_mtp"]),
            "spec_state": pick(["snapshot", "replay", "log"]),
            "spec_topk": 1 if kind == "chain" else pick([2, 3]),
            "spec_steps": steps,
        }
        if drafts["spec_state"] == "log":
            drafts["decode_log"] = pick([None, rounds * (steps + 1)])
        if kind == "tree":
            drafts["spec_nodes"] = pick([None, steps + 1, steps + 2])
        return drafts

    def _count_splits(self) -> None:
        tree = self.harness.cache.tree
        split = tree._split

        def counting(*args: object) -> object:
            self.seen["splits"] += 1
            return split(*args)  # type: ignore[arg-type]

        tree._split = counting  # type: ignore[method-assign]

    # ---- operations --------------------------------------------------------------

    def walk(self, num_operations: int) -> None:
        """Perform operations, then come to rest: O1 for all, O2."""
        operations = [self.arrive] * 3 + [self.turn] * 6 + [self.begin] * 6 + [self.end] * 3
        operations += [self.abort, self.burst, self.twins]
        for _ in range(num_operations):
            self.rng.choice(operations)()
        self.harness.close()
        self._summarise()

    def arrive(self) -> None:
        """A request that shares a random length with a family, a former reply, or nobody."""
        self._add(self._prompt(), self.rng.choice([1, 1, 2, 5, 9, 20]))

    def twins(self) -> None:
        """The same prompt twice, with different limits."""
        prompt = self._prompt()
        self._add(prompt, 1)
        self._add(prompt, self.rng.choice([1, 6]))

    def burst(self) -> None:
        """Prompts that share all but the last token."""
        prompt = self._prompt()
        for _ in range(3):
            self._add([*prompt[:-1], self.rng.randrange(2, VOCAB)], 3)

    def turn(self) -> None:
        """One turn of the engine's loop."""
        self.harness.step()

    def begin(self) -> None:
        """Submit a step; without overlap it is committed before the next one."""
        while self.harness.num_in_flight > self.ahead:
            self.harness.end()
        self.seen["submitted"] += self.harness.begin() is not None
        self.seen["deep"] += self.harness.num_in_flight > 1

    def end(self) -> None:
        """Commit the oldest step in flight."""
        if self.harness.num_in_flight:
            self.harness.end()

    def abort(self) -> None:
        """Any client leaves, whatever its request is doing."""
        live = [r for r in self.harness.records.values() if r.reason is None]
        if live:
            busy = [r for r in live if r.state.num_in_flight]
            record = self.rng.choice(busy if busy and self.rng.random() < 0.5 else live)
            self.seen["aborts"] += 1
            self.seen["aborts in flight"] += record.state.num_in_flight > 0
            self.seen[f"aborts {record.state.status.value}"] += 1
            self.harness.abort(record)

    # ---- drawing -----------------------------------------------------------------

    def _prompt(self) -> list[int]:
        rng, limit = self.rng, self.harness.config.max_context - 1
        length = rng.choice([1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 18, 31, 33, 40, 64, 65])
        family = rng.randrange(FAMILIES)
        base = [family_token(family, i) for i in range(length)]
        done = [r for r in self.harness.records.values() if r.output]
        kind = rng.randrange(4)
        if kind == 0 and done:
            former = rng.choice(done)
            base = former.tokens + base[: rng.choice([1, 2, 5])]
        elif kind == 1:
            cut = rng.choice([0, 1, length // 2, length - 1])
            other = rng.randrange(100)
            base = base[:cut] + [family_token(other, i + 1) for i in range(length - cut)]
        return base[-limit:] if rng.random() < 0.1 else base[:limit]

    def _add(self, prompt: list[int], max_tokens: int) -> Record | None:
        rng = self.rng
        options: dict[str, object] = {}
        if rng.random() < 0.3:
            options["boundaries"] = tuple(
                Boundary(rng.randrange(0, len(prompt) + 2), rng.choice(list(BoundaryKind)))
                for _ in range(rng.randrange(1, 5))
            )
        if rng.random() < 0.15:
            options["salt"] = rng.choice(["a", "b"])
        if rng.random() < 0.2:
            options["stop_at"] = rng.choice([1, 2, 4])
        if rng.random() < 0.15:
            options["ignore_eos"] = True
        if rng.random() < 0.15:
            options["min_tokens"] = rng.randrange(0, max_tokens + 1)
        if rng.random() < 0.2:
            ahead = reply(prompt, max_tokens, vocab_size=VOCAB)
            options["stop_token_ids"] = [rng.choice(ahead)]
        try:
            return self.harness.add(prompt, max_tokens, **options)
        except (CapacityError, ContextLengthError):
            self.seen["refused"] += 1
            return None

    def _summarise(self) -> None:
        h, counters = self.harness, self.harness.cache.counters
        for field in dataclasses.fields(counters):
            self.seen[field.name.replace("_", " ")] += getattr(counters, field.name)
        for name in ("draft_rounds", "draft_tokens", "accepted_tokens"):
            self.seen[name.replace("_", " ")] += getattr(h.scheduler.counters, name)
        self.seen["folds"] += sum(len(batch.folds) for batch in h.runner.log)
        self.seen["fold-only steps"] += sum(
            bool(batch.folds) and not batch.num_rows for batch in h.runner.log
        )
        self.seen["requests"] += len(h.records)
        self.seen["preemptions"] += h.scheduler.counters.preemptions
        self.seen["hits"] += sum(r.state.num_cached_tokens > 0 for r in h.records.values())
        self.seen["end of sequence"] += sum(
            bool(r.output) and r.output[-1] == EOS for r in h.records.values()
        )
        for reason, count in h.scheduler.miss_reasons.items():
            self.seen[f"reason {reason}"] += count
