"""The 80 two-turn MT-bench questions through the openai client, several chats at a time.

    hyradix serve                                  # in one terminal
    python examples/mt_bench.py --concurrency 8    # in another

The second turn of a chat repeats the first prompt and its reply, so nearly all of it should come
from the prefix cache. Checked, and printed per category:

- all 160 replies finish;
- whole prompt: of each second prompt at least the first prompt less one token was cached;
- whole reply: at least the first prompt and reply less one token was cached, wherever the second
  prompt starts with the very ids that the first turn consumed and generated. (Text does not always
  tokenise back to the ids it was decoded from; such chats are left out of this count.)

Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

QUESTIONS = Path(__file__).parent.parent / "benchmarks/data/mt_bench_question.jsonl.gz"
COLUMNS = "{:<12}{:>6}{:>10}{:>10}{:>9}{:>14}{:>13}"


@dataclass(frozen=True)
class Turn:
    """One prompt and its reply, as token ids."""

    prompt: list[int]
    reply: list[int]
    text: str
    cached: int
    finish_reason: str

    @property
    def is_finished(self) -> bool:
        return self.finish_reason in ("stop", "length")


@dataclass(frozen=True)
class Chat:
    """Both turns of one question."""

    category: str
    first: Turn
    second: Turn

    @property
    def keeps_prompt(self) -> bool:
        """Whether the whole first prompt but its last token was cached."""
        return self.second.cached >= len(self.first.prompt) - 1

    @property
    def repeats_ids(self) -> bool:
        """Whether the second prompt starts with the ids that were generated."""
        start = self.first.prompt + self.first.reply
        return self.second.prompt[: len(start)] == start

    @property
    def keeps_reply(self) -> bool:
        """Whether prompt and reply but the last token were cached."""
        return self.second.cached >= len(self.first.prompt) + len(self.first.reply) - 1


async def ask(client: AsyncOpenAI, model: str, messages: list[Any], max_tokens: int) -> Turn:
    """One reply, greedy. ``return_token_ids`` is an extension of OpenAI's API."""
    reply = await client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    choice, usage = reply.choices[0], reply.usage
    extra = choice.model_extra or {}
    return Turn(
        prompt=extra["prompt_token_ids"],
        reply=extra["token_ids"],
        text=choice.message.content or "",
        cached=usage.prompt_tokens_details.cached_tokens,
        finish_reason=choice.finish_reason,
    )


async def chat(client: AsyncOpenAI, model: str, question: dict[str, Any], max_tokens: int) -> Chat:
    """Both turns of a question, one after the other."""
    messages = [{"role": "user", "content": question["turns"][0]}]
    first = await ask(client, model, messages, max_tokens)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": question["turns"][1]},
    ]
    return Chat(question["category"], first, await ask(client, model, messages, max_tokens))


async def run(args: argparse.Namespace) -> list[Chat]:
    """All chats, at most ``args.concurrency`` at a time."""
    with gzip.open(args.questions, "rt", encoding="utf-8") as lines:
        questions = [json.loads(line) for line in lines][: args.limit]
    room = asyncio.Semaphore(args.concurrency)
    async with AsyncOpenAI(base_url=args.base_url, api_key=args.api_key, max_retries=0) as client:
        model = args.model or (await client.models.list()).data[0].id

        async def one(question: dict[str, Any]) -> Chat:
            async with room:
                return await chat(client, model, question, args.max_tokens)

        return await asyncio.gather(*map(one, questions))


def row(name: str, chats: list[Chat]) -> dict[str, Any]:
    """The figures of some chats."""
    same = [c for c in chats if c.repeats_ids]
    return {
        "category": name,
        "chats": len(chats),
        "prompt_tokens": sum(len(c.second.prompt) for c in chats),
        "cached_tokens": sum(c.second.cached for c in chats),
        "prompts_kept": sum(c.keeps_prompt for c in chats),
        "same_ids": len(same),
        "replies_kept": sum(c.keeps_reply for c in same),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Second turns by category."""
    print(
        COLUMNS.format("2nd turns", "chats", "prompt", "cached", "share", "whole prompt", "reply")
    )
    for r in rows:
        print(
            COLUMNS.format(
                r["category"],
                r["chats"],
                r["prompt_tokens"],
                r["cached_tokens"],
                f"{r['cached_tokens'] / max(r['prompt_tokens'], 1):.1%}",
                f"{r['prompts_kept']} of {r['chats']}",
                f"{r['replies_kept']} of {r['same_ids']}",
            )
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, default=80, help="only the first so many questions")
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    args = parser.parse_args()
    started = time.monotonic()
    chats = asyncio.run(run(args))
    seconds = time.monotonic() - started
    by_category: dict[str, list[Chat]] = defaultdict(list)
    for c in chats:
        by_category[c.category].append(c)
    rows = [row(name, some) for name, some in by_category.items()]
    total = row("all", chats)
    print_table([*rows, total])
    turns = [turn for c in chats for turn in (c.first, c.second)]
    num_finished = sum(turn.is_finished for turn in turns)
    num_tokens = sum(len(turn.reply) for turn in turns)
    print(
        f"{num_finished} of {len(turns)} replies finished; {num_tokens} tokens in {seconds:.0f} s"
    )
    if args.json:
        figures = {"finished": num_finished, "replies": len(turns), "generated": num_tokens}
        figures |= {"seconds": round(seconds, 1), "rows": [*rows, total]}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    is_right = (
        num_finished == len(turns)
        and total["prompts_kept"] == total["chats"]
        and total["replies_kept"] == total["same_ids"]
    )
    print("all checks passed" if is_right else "FAILED: see the table")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
