"""Checks a trained checkpoint on a CPU with transformers and writes its model card.

    python training/evaluate.py --model TRAINED --tokenizer TOKENIZER --data DATA \
        --package src/hyradix/demo_model --license-texts training/licenses

Owns: the 20 fixed questions (greedy, at most 128 new tokens), the five samples, held-out loss, and
the card's text. With `--package` it also writes the folder that ships: weights in one file,
tokenizer, configuration, card, notices. Takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path

import torch
from batches import heldout_batches
from card import write_card
from corpus import SOURCES
from questions import QUESTIONS, SAMPLES
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
)

MAX_NEW = 128
SIZE_LIMIT = 32_000_000


def ask(
    model: Qwen3_5ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    question: str,
    *,
    temperature: float = 0.0,
) -> dict:
    """One reply: its text, number of tokens, and whether it ended by itself."""
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    sampling = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_p": 0.95, "top_k": 0}
    with torch.inference_mode():
        out = model.generate(**ids, max_new_tokens=MAX_NEW, **sampling)[
            0, ids["input_ids"].shape[1] :
        ].tolist()
    ended = out[-1] in (0, 2)
    text = tokenizer.decode(out[:-1] if ended else out, skip_special_tokens=False)
    return {"question": question, "reply": text, "tokens": len(out), "ended": ended}


@torch.inference_mode()
def heldout_loss(model: Qwen3_5ForCausalLM, data: Path, max_rows: int) -> dict[str, float]:
    """Loss per source over the first rows of held-out text, one document a row as in use.

    Rows are documents cut at 1,024 tokens, so the numbers are a little above the trainer's.
    """
    result = {}
    for source in SOURCES:
        path = data / f"{source.name}.heldout.npz"
        if not path.exists():
            continue
        total, count = 0.0, 0
        batches = heldout_batches(path, rows=1, length=1024, replies_only=False)[:max_rows]
        for ids, position, targets in ([torch.from_numpy(a) for a in b] for b in batches):
            bounds = [*(position[0] == 0).nonzero()[:, 0].tolist(), ids.shape[1]]
            for a, z in pairwise(bounds):
                goal = targets[0, a:z].long()
                if (goal >= 0).any():
                    logits = model(ids[:, a:z].long()).logits[0].float()
                    total += float(
                        torch.nn.functional.cross_entropy(
                            logits, goal, ignore_index=-100, reduction="sum"
                        )
                    )
                    count += int((goal >= 0).sum())
        if count:
            result[source.name] = round(total / count, 3)
    return result


def check_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises unless prefixes render as prefixes and a reply renders as it was generated."""
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi  there\n"},
        {"role": "assistant", "content": " Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    texts = [tokenizer.apply_chat_template(chat[:n], tokenize=False) for n in range(1, 5)]
    assert all(b.startswith(a) for a, b in pairwise(texts))
    prompt = tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
    assert texts[2] == prompt + chat[2]["content"] + "<|im_end|>\n"


def write_package(model: Qwen3_5ForCausalLM, tokenizer_dir: Path, package: Path) -> None:
    """Writes weights, configuration and tokenizer files of the shipped folder."""
    package.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(package, max_shard_size="1GB")
    for path in tokenizer_dir.iterdir():
        (package / path.name).write_bytes(path.read_bytes())


def main() -> None:
    """Evaluates, prints, and writes what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder of train.py")
    parser.add_argument(
        "--tokenizer", type=Path, help="folder of train_tokenizer.py (default: the model's)"
    )
    parser.add_argument(
        "--data", type=Path, help="folder of prepare_data.py, for the held-out loss"
    )
    parser.add_argument(
        "--rows", type=int, default=12, help="held-out rows of 1,024 tokens per source"
    )
    parser.add_argument("--package", type=Path, help="folder to write the shipped files to")
    parser.add_argument("--license-texts", type=Path, default=Path(__file__).parent / "licenses")
    args = parser.parse_args()
    begin = time.time()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
    check_template(tokenizer)
    model = Qwen3_5ForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).float().eval()
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0)
    replies = [ask(model, tokenizer, q) for q in QUESTIONS]
    samples = [ask(model, tokenizer, q, temperature=0.7) for q in SAMPLES]
    for reply in replies + samples:
        print(json.dumps(reply))
    num_ended = sum(r["ended"] for r in replies)
    print(f"evaluate: {num_ended} of {len(replies)} replies ended by themselves")
    loss = heldout_loss(model, args.data, args.rows) if args.data else {}
    print(f"evaluate: held-out loss {json.dumps(loss)}")
    metrics_path = args.model / "metrics.json"
    metrics = json.loads(metrics_path.read_text()) if metrics_path.exists() else {}
    meta_path = args.data / "meta.json" if args.data else None
    meta = json.loads(meta_path.read_text()) if meta_path and meta_path.exists() else {}
    if args.package:
        write_package(model, args.tokenizer or args.model, args.package)
        write_card(args.package, args.license_texts, replies, samples, loss, metrics, meta)
        size = sum(p.stat().st_size for p in args.package.rglob("*") if p.is_file())
        print(f"evaluate: {args.package} holds {size:,} bytes")
        assert size <= SIZE_LIMIT, "the shipped folder is too large"
    print(f"evaluate: {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
