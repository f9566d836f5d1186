"""A chat with a running server through the openai client, streamed.

    hyradix serve                      # in one terminal
    python examples/chat_client.py     # in another

Prints after each reply how much of its prompt came from the prefix cache.
"""

from __future__ import annotations

import argparse

from openai import OpenAI

QUESTIONS = ["What is a library?", "And what is a book?", "Thank you!"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = client.models.list().data[0].id
    messages: list = [{"role": "system", "content": "You are a friendly assistant."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        )
        text = ""
        for chunk in stream:
            if chunk.choices:
                delta = chunk.choices[0].delta.content or ""
                text += delta
                print(delta, end="", flush=True)
            if chunk.usage:  # the last chunk
                cached = chunk.usage.prompt_tokens_details.cached_tokens
                print(f"\n[{cached} of {chunk.usage.prompt_tokens} prompt tokens were cached]")
        messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    main()
