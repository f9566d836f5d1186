#!/usr/bin/env python3
"""Deterministic request workloads for measuring prefix reuse.

    python benchmarks/workloads.py NAME [--seed 1] [--limit N] > NAME.jsonl

One JSON line a request, in arrival order:
{"prompt": [ids], "output": [ids], "parent": index or -1, "marks": [positions]}.
`parent` is an earlier request whose output this prompt contains; it has finished before this one
arrives. `marks` are chat or document boundaries (token positions in the prompt) that a server
would know from its template. Same name and seed: same bytes.
Names: shared_sys, multiturn, agent, longdoc, noshare, mooncake (a trace file, see --trace).
"""

import argparse
import gzip
import json
import sys
from pathlib import Path

import numpy as np

VOCAB = 32000
TRACE = Path(__file__).parent / "data/mooncake_conversation.jsonl.gz"


def tokens(rng, n):
    return rng.integers(10, VOCAB, size=int(n), dtype=np.int32)


def lognormal(rng, mean, sigma, lo, hi):
    return int(np.clip(rng.lognormal(np.log(mean), sigma), lo, hi))


def request(prompt, output, parent=-1, marks=()):
    return {"prompt": prompt, "output": output, "parent": parent, "marks": [int(m) for m in marks]}


def shared_sys(seed, n=1000):
    """Four applications with a long system prompt each (Zipf popularity), short user messages."""
    rng = np.random.default_rng([seed, 1])
    lengths = [2200, 1500, 4000, 617]
    prompts = [tokens(rng, length) for length in lengths]
    p = 1 / np.arange(1, 5)
    p /= p.sum()
    for _ in range(n):
        system = prompts[rng.choice(4, p=p)]
        user = tokens(rng, lognormal(rng, 120, 0.7, 16, 600))
        yield request(
            np.concatenate([system, user]),
            tokens(rng, lognormal(rng, 180, 0.6, 16, 800)),
            marks=[len(system)],
        )


def multiturn(seed, conversations=150, active=60):
    """Chats, 60 interleaved: a prompt is the previous prompt, its reply, and new user text."""
    rng = np.random.default_rng([seed, 2])
    system = tokens(rng, 331)
    pool, started, count = [], 0, 0

    def new():
        return {
            "history": system,
            "left": int(rng.integers(2, 13)),
            "last": -1,
            "marks": [len(system)],
        }

    while started < min(active, conversations):
        pool.append(new())
        started += 1
    while pool:
        k = int(rng.integers(0, len(pool)))
        chat = pool[k]
        user = tokens(rng, lognormal(rng, 80, 0.9, 8, 1200))
        reply = tokens(rng, lognormal(rng, 260, 0.7, 16, 1500))
        prompt = np.concatenate([chat["history"], user])
        yield request(prompt, reply, chat["last"], chat["marks"])
        chat["last"], chat["history"] = count, np.concatenate([prompt, reply])
        chat["marks"] = chat["marks"] + [len(chat["history"])]
        count += 1
        chat["left"] -= 1
        if chat["left"] == 0:
            if started < conversations:
                pool[k] = new()
                started += 1
            else:
                pool.pop(k)


def agent(seed):
    """Few-shot tasks, one prompt 8 times, tool trajectories with retries from earlier steps."""
    rng = np.random.default_rng([seed, 3])
    streams = []
    for _ in range(8):
        shots = tokens(rng, lognormal(rng, 2600, 0.3, 1200, 5000))
        streams.append(
            [("shots", shots, tokens(rng, lognormal(rng, 90, 0.5, 20, 300))) for _ in range(40)]
        )
    instruction, samples = tokens(rng, 907), []
    for _ in range(25):
        question = np.concatenate([instruction, tokens(rng, lognormal(rng, 350, 0.6, 60, 1500))])
        samples += [("samples", question, None)] * 8
    streams.append(samples)
    tools = tokens(rng, 4133)
    streams += [[("tools", tools, int(rng.integers(8, 22)))] for _ in range(24)]
    position, alive = [0] * len(streams), list(range(len(streams)))
    burst, trajectories, count = None, {}, 0
    while alive:
        k = burst if burst is not None else alive[int(rng.integers(0, len(alive)))]
        kind, head, extra = streams[k][position[k]]
        if kind == "shots":
            yield request(
                np.concatenate([head, extra]),
                tokens(rng, lognormal(rng, 200, 0.5, 20, 600)),
                marks=[len(head)],
            )
            position[k] += 1
        elif kind == "samples":
            yield request(
                head, tokens(rng, lognormal(rng, 320, 0.5, 40, 900)), marks=[len(instruction)]
            )
            position[k] += 1
            burst = k if position[k] % 8 else None
        else:
            if k not in trajectories:
                first = np.concatenate([head, tokens(rng, lognormal(rng, 200, 0.5, 40, 800))])
                trajectories[k] = {"steps": [(first, -1, [len(head)])], "left": extra}
            run = trajectories[k]
            history, parent, marks = run["steps"][-1]
            if len(run["steps"]) > 2 and rng.random() < 0.15:
                history, parent, marks = run["steps"][int(rng.integers(1, len(run["steps"])))]
            reply = tokens(rng, lognormal(rng, 150, 0.7, 20, 800))
            yield request(history, reply, parent, marks)
            longer = np.concatenate(
                [history, reply, tokens(rng, lognormal(rng, 500, 0.9, 30, 4000))]
            )
            run["steps"].append((longer, count, [*marks, len(history) + len(reply)]))
            run["left"] -= 1
            if run["left"] == 0:
                position[k] += 1
        count += 1
        if position[k] >= len(streams[k]):
            alive.remove(k)


def longdoc(seed, documents=40, n=300):
    """Questions about long documents (8k-64k tokens), documents asked again (Zipf)."""
    rng = np.random.default_rng([seed, 4])
    preamble = tokens(rng, 203)
    docs = [tokens(rng, lognormal(rng, 16000, 0.7, 8000, 64000)) for _ in range(documents)]
    p = 1 / np.arange(1, documents + 1) ** 0.8
    p /= p.sum()
    for _ in range(n):
        doc = docs[rng.choice(documents, p=p)]
        prompt = np.concatenate([preamble, doc, tokens(rng, lognormal(rng, 45, 0.5, 10, 200))])
        yield request(
            prompt,
            tokens(rng, lognormal(rng, 160, 0.6, 16, 600)),
            marks=[len(preamble), len(preamble) + len(doc)],
        )


def noshare(seed, n=500):
    """Nothing shared."""
    rng = np.random.default_rng([seed, 5])
    for i in range(n):
        body = tokens(rng, lognormal(rng, 1500, 0.8, 200, 8000))
        yield request(
            np.concatenate([np.array([VOCAB + i], np.int32), body]),
            tokens(rng, lognormal(rng, 200, 0.6, 16, 800)),
        )


def mooncake(seed, trace, n=1500):
    """A real trace (512-token block hashes): tokens come from the hashes, outputs are random."""
    opener = gzip.open if str(trace).endswith(".gz") else open
    count = 0
    with opener(trace, "rt") as lines:
        for i, line in enumerate(lines):
            row = json.loads(line)
            length = int(row["input_length"])
            if length > 64000:
                continue
            blocks = [tokens(np.random.default_rng([7, int(h)]), 512) for h in row["hash_ids"]]
            num_output = max(1, min(2000, int(row["output_length"])))
            output = tokens(np.random.default_rng([seed, 8, i]), num_output)
            yield request(np.concatenate(blocks)[:length], output)
            count += 1
            if count >= n:
                return


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "name", choices=["shared_sys", "multiturn", "agent", "longdoc", "noshare", "mooncake"]
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=int, default=10**9)
    parser.add_argument("--trace", default=TRACE)
    args = parser.parse_args()
    make = globals()[args.name]
    rows = make(args.seed, args.trace) if args.name == "mooncake" else make(args.seed)
    for i, row in enumerate(rows):
        if i >= args.limit:
            break
        row["prompt"], row["output"] = row["prompt"].tolist(), row["output"].tolist()
        sys.stdout.write(json.dumps(row, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
