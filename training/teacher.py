"""Writes short synthetic chats with a small teacher model (SmolLM2-135M-Instruct, Apache-2.0).

    python training/teacher.py --gguf MODEL.gguf --corpus CORPUS --out DIR --minutes 5

Owns: rounds of questions and replies, and the filter that throws most bad replies away.
Writes DIR/teacher_N.jsonl.gz, one `{"src": ..., "messages": [...]}` a line, each file under 15 MiB;
every round is flushed, so a run that is cut short loses one round at most.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from teacher_model import Teacher, read_gguf
from teacher_prompts import FOLLOW_UPS, SHOTS, SYSTEM, Prompt, PromptMaker, load_corpus_topics
from tokenizers import Tokenizer

START, END = "<|im_start|>", "<|im_end|>"
MAX_FILE_BYTES = 14_000_000
BAD = re.compile(
    r"smollm|hugging ?face|openai|chatgpt|language model|as an ai|i'm an ai|i am an ai|\bai\b|"
    r"https?:|www\.|@|<\||\[|\]|```|sorry, but i|i cannot|i'm not able|creative writing|"
    r"helpful assistant",
    re.IGNORECASE,
)


def turn(role: str, text: str) -> str:
    """One rendered chat turn."""
    return f"{START}{role}\n{text}{END}\n"


def render(messages: list[dict], kind: str, rng: random.Random) -> str:
    """The teacher's prompt: its instruction, worked examples in random order, then the chat."""
    shots = rng.sample(SHOTS[kind], k=min(len(SHOTS[kind]), 3))
    text = turn("system", SYSTEM)
    for question, answer in shots:
        text += turn("user", question) + turn("assistant", answer)
    return text + "".join(turn(m["role"], m["content"]) for m in messages)


def looks_repetitive(text: str) -> bool:
    """True if words or word triples come back more often than in ordinary prose."""
    tokens = re.findall(r"[a-z0-9']+", text.lower())
    if any(a == b for a, b in pairwise(tokens)):
        return True
    triples = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    if any(a == c and b in ("and", "is", "or") for a, b, c in triples):
        return True
    if triples and len(set(triples)) < 0.93 * len(triples):
        return True
    content = Counter(t for t in tokens if len(t) > 4)
    return (
        len(tokens) > 12 and bool(content) and content.most_common(1)[0][1] > 2 + len(tokens) / 20
    )


def is_good_reply(text: str) -> bool:
    """True for a short, clean English reply that reads as finished."""
    if not 2 <= len(text) <= 700 or not text.isascii() or BAD.search(text):
        return False
    if not (text[0].isupper() or text[0].isdigit() or text[0] == '"'):
        return False
    if text[-1] not in ".!?\"'" or text.count("\n") > 8 or text.startswith("I'm sorry, I'm not"):
        return False
    lines = [re.sub(r"^\W*\d*\W*", "", line) for line in text.splitlines() if line.strip()]
    if len(set(lines)) < len(lines):
        return False
    return not looks_repetitive(text)


def is_good_question(text: str) -> bool:
    """True for a short user turn worth answering (used on turns the teacher made up)."""
    if not 8 <= len(text) <= 220 or not text.isascii() or BAD.search(text) or "\n\n" in text:
        return False
    return text[0].isupper() and text[-1] in ".!?" and not looks_repetitive(text)


class Writer:
    """Appends chats to numbered gzip files and starts a new file before one grows too large."""

    def __init__(self, out: Path) -> None:
        self.out, self.index, self.seen = out, 0, set()
        out.mkdir(parents=True, exist_ok=True)

    def write(self, chats: list[tuple[str, list[dict]]]) -> int:
        """Appends new chats; returns how many were new."""
        lines = []
        for source, messages in chats:
            key = hash(tuple(m["content"] for m in messages))
            if key not in self.seen:
                self.seen.add(key)
                lines.append(json.dumps({"src": source, "messages": messages}) + "\n")
        path = self.out / f"teacher_{self.index}.jsonl.gz"
        with gzip.open(path, "at", encoding="utf-8", compresslevel=6) as file:
            file.writelines(lines)
        if path.stat().st_size > MAX_FILE_BYTES - 2_500_000:
            self.index += 1
        return len(lines)


class Session:
    """Rounds of asking. One round: draw questions, answer, answer some follow-ups, write."""

    def __init__(
        self,
        teacher: Teacher,
        tokenizer: Tokenizer,
        maker: PromptMaker,
        rng: random.Random,
        rows: int,
    ) -> None:
        self.teacher, self.tokenizer, self.maker, self.rng, self.rows = (
            teacher,
            tokenizer,
            maker,
            rng,
            rows,
        )
        self.stop = tokenizer.token_to_id(END)
        self.num_generated = 0
        self.last_kept_share = 0.0

    def _complete(
        self, prompts: list[str], max_new: int, temperature: float, min_p: float
    ) -> list[str | None]:
        """Texts in the order of `prompts`; waves hold prompts of like length."""
        ids = [e.ids for e in self.tokenizer.encode_batch(prompts, add_special_tokens=False)]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        texts: list[str | None] = [None] * len(ids)
        for a in range(0, len(order), self.rows):
            wave = order[a : a + self.rows]
            replies = self.teacher.generate(
                [ids[i] for i in wave],
                max_new=max_new,
                stop=self.stop,
                temperature=temperature,
                min_p=min_p,
            )
            self.num_generated += sum(len(r) for r in replies if r is not None)
            for i, text in zip(
                wave, self.tokenizer.decode_batch([r or [] for r in replies]), strict=True
            ):
                texts[i] = text.strip() or None
        return texts

    def make_up_questions(self, count: int) -> list[Prompt]:
        """User turns the teacher writes itself after a bare user header."""
        prefix = turn("system", "You are a helpful assistant.") + f"{START}user\n"
        texts = self._complete([prefix] * count, 48, 0.9, 0.06)
        return [Prompt(t, "fact") for t in texts if t and is_good_question(t)]

    def answer(
        self, chats: list[tuple[str, list[dict]]], temperature: float
    ) -> list[tuple[str, list[dict]]]:
        """Appends a reply to each chat `(kind, messages)` and returns those with a good one."""
        prompts = [render(m, kind, self.rng) + f"{START}assistant\n" for kind, m in chats]
        texts = self._complete(prompts, 128, temperature, 0.1)
        kept = [
            (kind, [*m, {"role": "assistant", "content": text}])
            for (kind, m), text in zip(chats, texts, strict=True)
            if text and is_good_reply(text) and text not in [turn["content"] for turn in m]
        ]
        self.last_kept_share = len(kept) / max(1, len(chats))
        return kept

    def follow_up(self, chats: list[tuple[str, list[dict]]]) -> list[tuple[str, list[dict]]]:
        """Adds a second user turn: half from a list, half made up by the teacher."""
        listed = [c for i, c in enumerate(chats) if i % 2 == 0]
        made_up = [c for i, c in enumerate(chats) if i % 2 == 1]
        result = [
            (k, [*m, {"role": "user", "content": self.rng.choice(FOLLOW_UPS)}]) for k, m in listed
        ]
        prompts = [render(m, k, self.rng) + f"{START}user\n" for k, m in made_up]
        for (kind, m), text in zip(made_up, self._complete(prompts, 40, 0.7, 0.1), strict=True):
            if text and is_good_question(text):
                result.append((kind, [*m, {"role": "user", "content": text}]))
        return result

    def round(self, magpie_share: float, follow_share: float) -> list[tuple[str, list[dict]]]:
        """One round: three waves of single turns, then follow-ups on a share of them."""
        total = 3 * self.rows
        prompts = self.make_up_questions(int(magpie_share * total))
        num_made_up = len(prompts)
        prompts += [self.maker.draw() for _ in range(total - num_made_up)]
        chats = [(p.kind, [{"role": "user", "content": p.text}]) for p in prompts]
        done = self.answer(chats, self.rng.choice([0.3, 0.4, 0.5]))
        share = self.last_kept_share
        again = self.rng.sample(done, int(follow_share * len(done)))
        longer = self.answer(self.follow_up(again), 0.4)
        print(
            f"teacher: {num_made_up} own questions; kept {share:.0%} of replies, "
            f"{self.last_kept_share:.0%} of second replies"
        )
        return done + longer


def main() -> None:
    """Runs rounds until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--gguf", required=True, help="the teacher's GGUF file (Llama architecture)"
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the texts (topics)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rows", type=int, default=4096, help="sequences per wave")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-mib", type=float, default=48.0, help="stop at this much output")
    args = parser.parse_args()
    begin = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    shape, weights, tokenizer = read_gguf(args.gguf)
    print(f"teacher: read {args.gguf} in {time.time() - begin:.1f} s")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    teacher = Teacher(shape, weights, device=device, dtype=dtype)
    rng = random.Random(args.seed)
    nouns, others = load_corpus_topics(args.corpus)
    print(f"teacher: {len(nouns)} nouns, {len(others)} questions of the corpus")
    maker = PromptMaker(nouns, others, rng)
    session, writer = Session(teacher, tokenizer, maker, rng, args.rows), Writer(args.out)
    num_chats, longest_s, rounds = 0, 0.0, 0
    while time.time() - begin + longest_s < args.minutes * 60 or rounds == 0:
        start = time.time()
        chats = None
        try:
            chats = session.round(0.3, 0.35)
        except torch.OutOfMemoryError:
            if session.rows < 256:
                raise
        if chats is None:  # outside the handler, where the failed call's tensors are free
            session.rows //= 2
            torch.cuda.empty_cache()
            print(f"teacher: out of memory, now {session.rows} rows a wave")
            continue
        num_chats += writer.write([(f"teacher-{kind}", m) for kind, m in chats])
        longest_s, rounds = max(longest_s, time.time() - start), rounds + 1
        size = sum(p.stat().st_size for p in args.out.glob("teacher_*.jsonl.gz")) / 2**20
        print(
            f"teacher: round {rounds}, {time.time() - start:.1f} s, {num_chats} chats, "
            f"{session.num_generated / 1e6:.2f} M tokens sampled, {size:.1f} MiB, "
            f"{time.time() - begin:.0f} s"
        )
        for kind, messages in rng.sample(chats, min(3, len(chats))):
            print("  ", kind, json.dumps([m["content"] for m in messages]))
        if size > args.max_mib:
            break


if __name__ == "__main__":
    main()
