"""A small byte-level tokenizer in the manner of Qwen's, and chat templates of several tempers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from hyradix.text.tokenizer import Tokenizer

CORPUS = [
    "You are a helpful assistant. Answer the user's question in a few words.\n\n",
    "The quick brown fox jumps over the lazy dog 12345 times, doesn't it?  Yes!\n",
    "def main():\n    return [x for x in range(10)]\n\n\n# Grüße aus Köln, 你好世界 😀 😃\n",
    "user\nassistant\nsystem\nuser\n\nuser\n  assistant\n\n",
]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINK_STRIPPING = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% if ns.last < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for m in messages %}"
    "{% set content = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if loop.last and m.role != 'user' and not add_generation_prompt %}"
    "{{ raise_exception('The last message must be of the user') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }}<|endoftext|>{% endif %}{% endfor %}"
)


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_end|>x")
        ]
    )
    backend.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")]
    )
    backend.add_tokens([AddedToken("quick brown", special=False, normalized=True, lstrip=True)])
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    """In the manner of SentencePiece: a space before the text, bytes for unknown characters."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=[
            "<unk>",
            "<|im_start|>",
            "<|im_end|>",
            *(f"<0x{i:02X}>" for i in range(256)),
        ],
        show_progress=False,
    )
    backend.train_from_iterator([text.replace("你好世界 😀 😃", "") for text in CORPUS], trainer)
    spec = json.loads(backend.to_str())
    # The byte tokens stay in the vocabulary, but as ordinary tokens.
    spec["added_tokens"] = [t for t in spec["added_tokens"] if not t["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def write_model_dir(path: Path, backend: tokenizers.Tokenizer, template: str = CHATML) -> Path:
    backend.save(str(path / "tokenizer.json"))
    config = {
        "eos_token": "<|im_end|>",
        "bos_token": {"content": "<|im_start|>"},
        "chat_template": template,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    eos = [backend.token_to_id("<|im_end|>"), backend.token_to_id("<|endoftext|>") or 0]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return path


@pytest.fixture(scope="session")
def backend() -> tokenizers.Tokenizer:
    """The library's own object, as the oracle."""
    return byte_level_backend()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_dir(
        write_model_dir(tmp_path_factory.mktemp("model"), byte_level_backend())
    )


@pytest.fixture(scope="session")
def metaspace_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_dir(
        write_model_dir(tmp_path_factory.mktemp("metaspace"), metaspace_backend())
    )
