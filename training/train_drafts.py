"""Trains the demo model's two draft heads on one GPU in a fixed time; the target stays frozen.

    python training/train_drafts.py --model src/hyradix/demo_model --data DRAFTS.npz \
        --out DIR --minutes 8.5

Owns: the phases (the target writes replies; the heads learn from them), the learning rate,
checkpoints. `DRAFTS.npz` is made by `prepare_drafts.py`. Writes DIR/draft_heads.safetensors (bf16)
and DIR/draft_metrics.json every minute and at the end.
Read next: `draft_tokens.py`, `draft_model.py`, `draft_loss.py`, `draft_eval.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from delta_rule import delta_rule_torch
from draft_eval import make_heldout, measure, pack, right_steps
from draft_loss import draft_losses
from draft_model import INTERMEDIATE, make_heads
from draft_tokens import Mix, Session, TokenStore, load_chats, make_work
from model import Model, Pieces, Shape
from optim import Optimizer
from safetensors.torch import save_file
from target_stream import TargetStream
from torch import Tensor
from train import load_weights

SAVE_EVERY_S, LOG_EVERY, WARMUP_STEPS, FINAL_LR_SHARE = 60.0, 50, 100, 0.02
STEP_DECAY = 0.8  # weight of each step's loss against the one before
HEADS_FILE, METRICS_FILE = "draft_heads.safetensors", "draft_metrics.json"


def learning_rate_scale(progress: float, step: int) -> float:
    """Warm-up by steps, then half a cosine by time."""
    fall = FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (
        1 + math.cos(math.pi * min(1.0, progress))
    )
    return min(1.0, (step + 1) / WARMUP_STEPS) * fall


class DraftTrainer:
    """Target, heads, optimizers and clock."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin = args, time.time()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        shape = Shape()
        self.target = Model(shape, pieces=Pieces(compiled=False), delta_rule=delta_rule_torch)
        weights = load_weights(args.model)
        self.target.load(weights)
        self.target.to(self.device).requires_grad_(False)
        self.embed = self.target.table["model.embed_tokens.weight"]
        self.heads = make_heads(shape, INTERMEDIATE)
        for head in self.heads.values():
            head.start_from(weights, shape.num_layers - 1)
            head.to(self.device)
        self.optimizers = [Optimizer(h.table, lr=args.lr) for h in self.heads.values()]
        self.metrics: dict = {"heads": {}, "history": []}
        self.step, self.last_save = 0, time.time()
        self.held = make_heldout(
            self.target,
            str(args.data),
            length=args.heldout_length,
            max_new=args.heldout_new,
            limit=args.heldout,
        )
        self.log(f"{self.held.store.count} held-out tokens")

    def log(self, text: str) -> None:
        """One line with the time since the start."""
        print(f"drafts: {time.time() - self.begin:.0f} s: {text}", flush=True)

    def write_replies(self, deadline: float) -> TokenStore:
        """The first phase: the target reads and writes until the time or the work is over."""
        args, begin = self.args, time.time()
        chats, order = load_chats(str(args.data), "")
        work = make_work(chats, order[: args.documents or None], Mix(), args.seed)
        self.log(f"{len(work.sizes)} documents to go through")
        stream = TargetStream(self.target, args.rows, args.length, kv_dtype=self.dtype)
        store = TokenStore(stream, args.capacity, self.dtype)
        Session(stream, store, work).run(deadline)
        seconds, goals = time.time() - begin, int(store.is_goal.sum())
        self.metrics["written"] = {
            "documents": len(store.sizes),
            "tokens": store.count,
            "reply_tokens": goals,
            "seconds": round(seconds, 1),
        }
        self.log(f"{self.metrics['written']}, {store.count / seconds / 1e3:.0f}k tokens a second")
        return store

    def save(self) -> None:
        """Writes heads and metrics; raises, and writes nothing, if a weight is not finite."""
        if not all(bool(p.isfinite().all()) for h in self.heads.values() for p in h.parameters()):
            raise FloatingPointError("a weight is not finite; the last checkpoint stays")
        self.args.out.mkdir(parents=True, exist_ok=True)
        tensors = {
            n: p.detach().bfloat16().cpu() for h in self.heads.values() for n, p in h.table.items()
        }
        save_file(tensors, self.args.out / HEADS_FILE, metadata={"format": "pt"})
        self.metrics |= {"steps": self.step, "seconds": round(time.time() - self.begin, 1)}
        (self.args.out / METRICS_FILE).write_text(json.dumps(self.metrics, indent=1) + "\n")
        self.last_save = time.time()

    @torch.no_grad()
    def round_weights(self) -> None:
        """Rounds the heads as the file does, so that what is measured is what is written."""
        for head in self.heads.values():
            for parameter in head.parameters():
                parameter.copy_(parameter.bfloat16())

    def evaluate(self) -> None:
        """Measures both heads on the held-out replies."""
        entry: dict = {"step": self.step}
        for name, head in self.heads.items():
            right = right_steps(head, self.held.store, self.embed, self.args.heldout_length)
            found = measure(right, self.held)
            parameters = sum(p.numel() for p in head.parameters())
            self.metrics["heads"][name] = {"parameters": parameters, "heldout": found}
            entry[name] = {s: m["tokens_per_round"]["3"] for s, m in found.items()}
        self.metrics["history"].append(entry)
        self.log(f"tokens a round with chains of 3: {json.dumps(entry)}")

    def train(self, store: TokenStore, end: float) -> None:
        """The second phase: batches of packed documents until `end`."""
        args, start, rng = self.args, time.time(), np.random.default_rng(self.args.seed)
        sizes = np.array(store.sizes)
        while True:
            index = pack(sizes, args.length, rng.permutation(len(sizes)))
            rng.shuffle(index)
            for at in torch.from_numpy(index).split(args.batch_rows):
                progress = (time.time() - start) / max(1e-6, end - start)
                if progress >= 1.0 or (args.max_steps and self.step >= args.max_steps):
                    return
                self.train_step(store, at.to(self.device), progress)
                if time.time() - self.last_save > SAVE_EVERY_S:
                    self.evaluate()
                    self.save()

    def train_step(self, store: TokenStore, at: Tensor, progress: float) -> None:
        """One update of both heads from int64[R, T] places."""
        args, heads = self.args, list(self.heads.values())
        rows, goal = store.rows(at)
        most, share = args.anchors, args.hard_share
        losses = draft_losses(
            heads, rows, goal, self.embed, num_steps=args.steps, most=most, hard_share=share
        )
        weights = STEP_DECAY ** torch.arange(args.steps, device=self.device)
        torch.stack([(loss * weights).sum() / weights.sum() for loss in losses]).sum().backward()
        scale = learning_rate_scale(progress, self.step)
        norms = [o.step(scale) for o in self.optimizers]
        self.step += 1
        if self.step % LOG_EVERY == 0 or self.step == 1:
            shown = {
                h.name: [round(x, 3) for x in loss.tolist()]
                for h, loss in zip(heads, losses, strict=True)
            }
            lengths = [round(float(n), 3) for n in norms]
            self.log(f"step {self.step} lr x{scale:.3f} norms {lengths} {json.dumps(shown)}")

    def run(self) -> None:
        """Both phases, then the last measurement and checkpoint."""
        args = self.args
        end = self.begin + 60 * args.minutes - args.reserve_s
        now = time.time()
        store = self.write_replies(now + args.writing_share * (end - now))
        if self.device == "cuda":
            torch.cuda.empty_cache()
        self.metrics["settings"] = {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
        begin = time.time()
        self.train(store, end)
        self.metrics["training_seconds"] = round(time.time() - begin, 1)
        self.round_weights()
        self.evaluate()
        self.save()
        self.log(f"done, {self.step} steps of at most {args.batch_rows * args.length} tokens")
        if self.device == "cuda":
            self.log(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the shipped folder")
    parser.add_argument("--data", type=Path, required=True, help="file of prepare_drafts.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.5, help="from start to the last save")
    parser.add_argument("--reserve-s", type=float, default=12.0, help="kept for the last save")
    parser.add_argument("--writing-share", type=float, default=0.3, help="of the time")
    parser.add_argument("--steps", type=int, default=5, help="draft steps trained")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hard-share", type=float, default=0.5)
    parser.add_argument("--rows", type=int, default=4096, help="documents written side by side")
    parser.add_argument("--length", type=int, default=512, help="longest document, and row")
    parser.add_argument("--capacity", type=int, default=24_000_000, help="tokens kept")
    parser.add_argument("--batch-rows", type=int, default=64)
    parser.add_argument("--anchors", type=int, default=20_480, help="chains a batch, at most")
    parser.add_argument("--heldout", type=int, default=200, help="prompts of a test set, at most")
    parser.add_argument("--heldout-length", type=int, default=1024)
    parser.add_argument("--heldout-new", type=int, default=256)
    parser.add_argument("--documents", type=int, default=0, help="only so many, to try the script")
    parser.add_argument("--max-steps", type=int, default=0, help="to try the script")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    DraftTrainer(parse_args()).run()
