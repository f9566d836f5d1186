"""The folder that ships: size, contents, and that transformers can use it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from card import HEAD, LICENSE_NOTE, ORIGINS
from evaluate import SIZE_LIMIT, ask, check_template
from questions import QUESTIONS, SAMPLES
from transformers import AutoTokenizer, Qwen3_5ForCausalLM


@pytest.fixture(scope="module")
def readme(shipped: Path) -> str:
    return (shipped / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def metrics(shipped: Path) -> dict:
    return json.loads((shipped / "metrics.json").read_text())


def test_size(shipped: Path):
    assert SIZE_LIMIT == 32_000_000
    assert sum(p.stat().st_size for p in shipped.rglob("*") if p.is_file()) <= SIZE_LIMIT


def test_context_and_end_tokens(shipped: Path):
    config = json.loads((shipped / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(shipped)
    assert config["max_position_embeddings"] >= 8192
    assert tokenizer.model_max_length == config["max_position_embeddings"]
    assert len(tokenizer) == config["vocab_size"]
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert ends == config["eos_token_id"]
    assert json.loads((shipped / "generation_config.json").read_text())["eos_token_id"] == ends


@pytest.mark.slow
def test_transformers_loads_it_and_gets_an_answer(shipped: Path):
    model, info = Qwen3_5ForCausalLM.from_pretrained(
        shipped, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    tokenizer = AutoTokenizer.from_pretrained(shipped)
    check_template(tokenizer)
    reply = ask(model.eval(), tokenizer, "What is the capital of France?")
    assert reply["reply"] == "The capital of France is Paris."
    assert reply["ended"]


def test_card_holds_the_twenty_questions_with_replies(readme: str):
    assert len(set(QUESTIONS)) == 20
    for question in (*QUESTIONS, *SAMPLES):
        block = rf"^\*\*{re.escape(question)}\*\* \(\d+ tokens[^)]*\)\n```text\n.+?\n```$"
        assert len(re.findall(block, readme, re.MULTILINE | re.DOTALL)) == 1, question


def test_card_says_what_its_script_says(readme: str, metrics: dict):
    assert readme.startswith(HEAD.format(parameters=metrics["parameters"] / 1e6))
    assert LICENSE_NOTE in readme
    total = f"{metrics['steps']} steps, {metrics['tokens'] / 1e6:.1f} M tokens"
    assert f"{total}, {metrics['seconds']:.0f} s." in readme


def test_card_names_origin_and_licence_of_every_text(readme: str, metrics: dict):
    sources = re.findall(r"^\| ([\w-]+) \| .* \| \d+\.\d\d \| ", readme, re.MULTILINE)
    assert set(metrics["stages"]["chat"]["heldout"]) <= set(sources)
    for source in sources:
        origin, licence = ORIGINS[source]
        assert f"| {source} | {origin} | {licence} |" in readme


def test_notices_and_licences_ship(shipped: Path):
    notice = (shipped / "NOTICE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"licenses/[\w.-]+\.txt", notice))
    assert named == {f"licenses/{p.name}" for p in (shipped / "licenses").iterdir()}
    assert {"licenses/Apache-2.0.txt", "licenses/MIT.txt", "licenses/WordNet-3.0.txt"} <= named
    assert all(len((shipped / name).read_text(encoding="utf-8")) > 500 for name in named)
    assert "https://creativecommons.org/licenses/by-sa/4.0/" in notice
