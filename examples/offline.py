"""The engine inside a Python program: no server, no sockets.

python examples/offline.py
"""

from __future__ import annotations

from hyradix import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)


def main() -> None:
    llm = LLM("demo", kv_slots=16_384, states=64)

    print("== generate: a batch of prompts, results in their order")
    prompts = ["The capital of France is", "Once upon a time,", [704, 16]]  # text or token ids
    for result in llm.generate(prompts, GREEDY):
        print(repr(result.prompt), "->", repr(result.outputs[0].text))

    print("== several replies of one prompt, reproducible by their seed")
    sampled = SamplingParams(n=2, temperature=0.8, top_p=0.95, seed=7, max_tokens=16, logprobs=1)
    for reply in llm.generate("My favourite animal is", sampled)[0].outputs:
        print(reply.finish_reason, round(reply.cumulative_logprob or 0, 2), repr(reply.text))

    print("== chat: the second question finds the first, and its reply, in the cache")
    messages = [{"role": "user", "content": "What is a library?"}]
    first = llm.chat(messages, GREEDY)[0]
    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "Thank you!"},
    ]
    second = llm.chat(messages, GREEDY)[0]
    print(
        len(second.prompt_token_ids), "prompt tokens,", second.num_cached_tokens, "from the cache"
    )

    print("== stream: text as it comes")
    for output in llm.stream_chat([{"role": "user", "content": "Who are you?"}], GREEDY):
        print(output.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
