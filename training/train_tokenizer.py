"""Trains the byte-level BPE of 8,192 tokens and writes it with the chat template.

python training/train_tokenizer.py --corpus CORPUS --teacher teacher_*.jsonl.gz --out DIR
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from chat_format import CHAT_TEMPLATE, END_OF_TEXT, MAX_LENGTH, SPECIAL_TOKENS, TURN_END, VOCAB_SIZE
from corpus import SOURCES, Document, load_source
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# English contractions; a run of letters with the space before it; one digit; a run of other signs
# with the space before it; spaces, the last one left to the next word.
PIECES = r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SAMPLE_CHARS = 36_000_000


def new_tokenizer() -> Tokenizer:
    """An untrained tokenizer: bytes in, bytes out, nothing normalised."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def plain_text(document: Document) -> str:
    """A document's text without chat marks."""
    return document if isinstance(document, str) else "\n".join(m["content"] for m in document)


def sample_texts(corpus: Path, teacher: list[Path], limit: int) -> Iterator[str]:
    """Texts of every source, in shares between the two stages' weights."""
    for source in SOURCES:
        share = (source.pretrain_weight + source.chat_weight) / 2
        left = int(limit * share)
        for document in load_source(source, corpus, teacher, set(), seed=0):
            text = plain_text(document)[:200_000]
            yield text
            left -= len(text)
            if left < 0:
                break


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(out)
    # The plain class name, which transformers 4 and 5 both know.
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")


def check(tokenizer: Tokenizer) -> None:
    """Raises if a text does not come back as it went in."""
    rng = random.Random(1)
    points = [
        chr(rng.choice((rng.randrange(1, 0xD800), rng.randrange(0xE000, 0x110000))))
        for _ in range(3000)
    ]
    for text in (
        "Hello, it's  12,345.67!\n\n\tx = y\r\n ",
        "".join(points),
        "naïve 日本語 🙂 \u0000",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text, text
    assert len(tokenizer.encode("2048").ids) == 4
    assert tokenizer.get_vocab_size() == VOCAB_SIZE


def main() -> None:
    """Trains, checks, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sample-chars", type=int, default=SAMPLE_CHARS)
    args = parser.parse_args()
    tokenizer = new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=24,
    )
    tokenizer.train_from_iterator(
        sample_texts(args.corpus, args.teacher, args.sample_chars), trainer
    )
    check(tokenizer)
    save(tokenizer, args.out)
    text = "Hello! How can I help you today? The capital of France is Paris."
    print(f"tokenizer: {tokenizer.get_vocab_size()} tokens; {tokenizer.encode(text).tokens}")


if __name__ == "__main__":
    main()
