"""Trains the demo model on one GPU in a fixed time, or goes on from shipped weights.

    python training/train.py --data DATA --out DIR --minutes 9
        [--resume-from src/hyradix/demo_model]

Owns: the three stages (pretraining, long rows, chat), the learning-rate curve, checkpoints, logs.
The schedule goes by the share of time that has passed, so a slower GPU sees fewer tokens and still
ends with a finished model. Writes DIR/model*.safetensors (bf16, qwen3_5 layout, in pieces below
14 MB), config.json, generation_config.json and metrics.json, again and again while it trains.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from batches import Batch, Mix, heldout_batches, make_loader
from corpus import SOURCES
from delta_kernels import choose_delta_rule
from delta_rule import delta_rule_torch
from model import Model, Pieces, Shape
from optim import Optimizer
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig

SAVE_EVERY_S, LOG_EVERY, SNAPSHOT_EVERY = 75.0, 20, 100
WARMUP_STEPS = 150
DECAY_FROM = 0.55  # share of the time after which the learning rate falls linearly
FINAL_LR_SHARE = 0.02


@dataclass(frozen=True)
class Stage:
    """One stage: it ends when `until` of the time has passed."""

    name: str
    until: float
    mix: Mix


def make_stages(fractions: list[float], tokens: int, length: int, long_length: int) -> list[Stage]:
    """The three stages; all batches hold the same number of tokens."""
    total = sum(fractions)
    ends = [sum(fractions[: i + 1]) / total for i in range(3)]
    pretrain = tuple((s.name, s.pretrain_weight) for s in SOURCES)
    longer = tuple((s.name, s.long_weight) for s in SOURCES)
    chat = tuple((s.name, s.chat_weight) for s in SOURCES)
    return [
        Stage("pretrain", ends[0], Mix(pretrain, tokens // length, length, False, 0.05)),
        Stage("long", ends[1], Mix(longer, tokens // long_length, long_length, False, 1.0)),
        Stage("chat", ends[2], Mix(chat, tokens // length, length, True, 0.15)),
    ]


def to_transformers(model: Model) -> Qwen3_5ForCausalLM:
    """The transformers model with the same weights, bf16."""
    config = Qwen3_5TextConfig(
        **model.shape.config_kwargs(), eos_token_id=[2, 0], pad_token_id=0, bos_token_id=None
    )
    target = Qwen3_5ForCausalLM(config)
    weights = {name: p.detach().float().cpu() for name, p in model.table.items()}
    result = target.load_state_dict(weights, strict=False)
    assert set(result.missing_keys) <= {"lm_head.weight"}, result
    assert not result.unexpected_keys, result
    target.tie_weights()
    target = target.to(torch.bfloat16)
    target.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0)
    return target


def save(model: Model, out: Path, metrics: dict) -> None:
    """Writes the checkpoint and the metrics so far."""
    out.mkdir(parents=True, exist_ok=True)
    to_transformers(model).save_pretrained(out, max_shard_size="14MB")
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1))


def load_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder."""
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        weights |= load_file(path)
    return weights


def learning_rate_scale(progress: float, step: int, decay_from: float) -> float:
    """Warm-up by steps, then flat, then linear down to `FINAL_LR_SHARE` by time."""
    fall = max(0.0, (progress - decay_from) / (1.0 - decay_from))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (1.0 - (1.0 - FINAL_LR_SHARE) * min(1.0, fall))


class Trainer:
    """Model, optimizer and clock."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin = args, time.time()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.data: Path = args.data
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        shape = Shape()
        if args.tiny:
            shape = replace(
                shape,
                hidden=64,
                intermediate=64,
                num_layers=4,
                num_heads=2,
                num_kv_heads=1,
                num_k_heads=1,
                num_v_heads=2,
            )
        self.stages = make_stages(args.fractions, args.batch_tokens, args.length, args.long_length)
        rule = delta_rule_torch if args.tiny else choose_delta_rule()
        self.model = Model(shape, pieces=Pieces(compiled=False), delta_rule=rule)
        if args.resume_from:
            self.model.load(load_weights(args.resume_from))
            print(f"train: resumed from {args.resume_from}")
        self.model.to(self.device)
        self.optimizer = Optimizer(self.model.table, lr=args.lr)
        self.metrics: dict = {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "stages": {},
        }
        self.loaders: dict[str, Iterator] = {}
        self.tokens, self.step, self.lr_factor = 0, 0, 1.0
        print(f"train: {self.metrics['parameters'] / 1e6:.2f} M parameters on {self.device}")

    def loader(self, stage: Stage) -> Iterator:
        """The stage's batches; made at the first use."""
        if stage.name not in self.loaders:
            workers = self.args.workers
            self.loaders[stage.name] = make_loader(
                self.data, stage.mix, seed=self.args.seed, workers=workers
            )
        return self.loaders[stage.name]

    def to_device(self, batch: Batch) -> list[Tensor]:
        """int64 copies on the device."""
        return [torch.from_numpy(a).to(self.device).long() for a in batch]

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean loss of a batch over its targets."""
        ids, position, targets = batch
        losses = self.model.losses(ids, position, targets, dtype=self.dtype)
        return losses.sum() / (targets >= 0).sum().clamp_min(1)

    def try_compile(self) -> None:
        """Compiles the pieces, checks loss and gradients by the plain ones, keeps the faster."""
        if self.device != "cuda" or self.args.no_compile:
            return
        batch = self.to_device(next(self.loader(self.stages[0])))
        plain, compiled = self.model.pieces, Pieces(compiled=True)
        found: dict[str, tuple[float, float, float]] = {}
        try:
            for name, pieces in (("plain", plain), ("compiled", compiled)):
                self.model.pieces = pieces
                begin = time.time()
                for n in range(4):
                    if n == 1:
                        torch.cuda.synchronize()
                        first_s, start = time.time() - begin, time.time()
                    loss = self.loss(batch)
                    loss.backward()
                    grads = [p.grad for p in self.optimizer.parameters]
                    norm = float(torch.stack([g.norm() for g in grads]).norm())
                    for p in self.optimizer.parameters:
                        p.grad = None
                torch.cuda.synchronize()
                found[name] = (float(loss.detach()), norm, (time.time() - start) / 3)
                print(
                    f"train: {name} pieces: loss {float(loss.detach()):.4f}, "
                    f"gradient norm {norm:.4f}, {found[name][2] * 1e3:.1f} ms a pass, "
                    f"first {first_s:.1f} s, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
                )
            (a, b, plain_s), (c, d, compiled_s) = found["plain"], found["compiled"]
            same = abs(a - c) < 0.02 * abs(a) and abs(b - d) < 0.05 * abs(b) + 1e-3
            self.model.pieces = compiled if same and compiled_s < plain_s else plain
        except Exception as error:
            print(f"train: compiling failed, going on without: {error!r}")
            self.model.pieces = plain
            for p in self.optimizer.parameters:
                p.grad = None
        print(f"train: using {'compiled' if self.model.pieces is compiled else 'plain'} pieces")

    def try_long_rows(self) -> None:
        """One pass over long rows; leaves them out if it fails, as it does when memory is short."""
        index = next(i for i, s in enumerate(self.stages) if s.name == "long")
        before = self.stages[index - 1].until
        if self.stages[index].until <= before:
            return
        try:
            begin = time.time()
            loss = self.loss(self.to_device(next(self.loader(self.stages[index]))))
            loss.backward()
            print(
                f"train: a pass over long rows: loss {float(loss.detach()):.4f}, "
                f"{time.time() - begin:.1f} s"
            )
        except Exception as error:
            print(f"train: leaving out the long rows: {error!r}")
            self.stages[index] = replace(self.stages[index], until=before)
        for p in self.optimizer.parameters:
            p.grad = None

    @torch.no_grad()
    def heldout(self, *, replies_only: bool) -> dict[str, float]:
        """Held-out loss per source, nats a token; plain pieces, as compiling again costs more."""
        result = {}
        pieces, self.model.pieces = self.model.pieces, Pieces(compiled=False)
        mix = self.stages[0].mix
        for source in SOURCES:
            path = self.data / f"{source.name}.heldout.npz"
            if not path.exists() or (replies_only and source.chat_weight == 0):
                continue
            total, count = 0.0, 0
            for batch in heldout_batches(
                path, rows=mix.rows, length=mix.length, replies_only=replies_only
            ):
                ids, position, targets = self.to_device(batch)
                total += float(self.model.losses(ids, position, targets, dtype=self.dtype).sum())
                count += int((targets >= 0).sum())
            if count:
                result[source.name] = round(total / count, 4)
        self.model.pieces = pieces
        return result

    def report(self, name: str, steps: int, tokens: int, seconds: float) -> None:
        """Records and prints a stage's end."""
        stage = {"steps": steps, "tokens": tokens, "seconds": round(seconds, 1)}
        stage["heldout"] = self.heldout(replies_only=False)
        stage["heldout_replies"] = self.heldout(replies_only=True)
        self.metrics["stages"][name] = stage
        self.metrics |= {"steps": self.step, "tokens": self.tokens}
        print(f"train: stage {name} ended: {json.dumps(stage)}")

    def train(self) -> None:
        """All stages, then the last checkpoint."""
        self.try_compile()
        self.try_long_rows()
        start = time.time()
        end = self.begin + self.args.minutes * 60 - self.args.reserve_s
        print(f"train: {start - self.begin:.1f} s of preparation, {end - start:.0f} s to train")
        last_save, snapshot, previous = start, None, math.inf
        for stage in self.stages:
            if (time.time() - start) / (end - start) >= stage.until:
                continue
            loader, stage_start, stage_step, stage_tokens = (
                self.loader(stage),
                time.time(),
                self.step,
                self.tokens,
            )
            window_start, window_tokens, losses = time.time(), self.tokens, []
            while (progress := (time.time() - start) / (end - start)) < stage.until:
                if self.args.max_steps and self.step - stage_step >= self.args.max_steps:
                    break
                batch = self.to_device(next(loader))
                loss = self.loss(batch)
                loss.backward()
                scale = learning_rate_scale(progress, self.step, self.args.decay_from)
                norm = self.optimizer.step(scale * self.lr_factor)
                losses.append(loss.detach())
                self.step += 1
                self.tokens += batch[0].numel()
                if self.step % LOG_EVERY and not (self.args.max_steps and self.step % 2 == 0):
                    continue
                mean = float(torch.stack(losses).mean())
                now = time.time()
                if self.step % (5 * LOG_EVERY) == 0 or self.step <= 200:
                    rate = (self.tokens - window_tokens) / (now - window_start)
                    print(
                        f"train: {stage.name} step {self.step} loss {mean:.4f} "
                        f"norm {float(norm):.3f} lr x{scale:.3f} {rate / 1e3:.0f}k tokens/s "
                        f"{self.tokens / 1e6:.1f} M tokens {now - self.begin:.0f} s"
                    )
                    window_start, window_tokens = now, self.tokens
                losses = []
                if not math.isfinite(mean) or (mean > previous + 1.5 and snapshot):
                    print(
                        f"train: loss {mean} at step {self.step}: "
                        "back to the snapshot, half the rate"
                    )
                    self.restore(snapshot)
                    continue
                previous = mean
                if self.step % SNAPSHOT_EVERY == 0:
                    snapshot = [p.detach().clone() for p in self.optimizer.parameters]
                if now - last_save > SAVE_EVERY_S:
                    save(self.model, self.args.out, self.metrics)
                    last_save = now
            self.report(
                stage.name,
                self.step - stage_step,
                self.tokens - stage_tokens,
                time.time() - stage_start,
            )
            self.loaders.pop(stage.name, None)
            previous = math.inf
        self.metrics["seconds"] = round(time.time() - self.begin, 1)
        save(self.model, self.args.out, self.metrics)
        print(
            f"train: done, {self.step} steps, {self.tokens / 1e6:.1f} M tokens, "
            f"{self.metrics['seconds']} s"
        )

    @torch.no_grad()
    def restore(self, snapshot: list[Tensor] | None) -> None:
        """Goes back to a snapshot of the weights with a fresh optimizer at half the rate."""
        if snapshot is None:
            raise FloatingPointError("the loss was not finite before the first snapshot")
        for p, saved in zip(self.optimizer.parameters, snapshot, strict=True):
            p.copy_(saved)
        self.lr_factor *= 0.5
        self.optimizer = Optimizer(self.model.table, lr=self.args.lr)


def main() -> None:
    """Parses arguments and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of prepare_data.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="from start to finished checkpoint"
    )
    parser.add_argument(
        "--reserve-s", type=float, default=15.0, help="kept for the last evaluation and save"
    )
    parser.add_argument("--resume-from", type=Path, help="checkpoint folder to go on from")
    parser.add_argument(
        "--fractions",
        type=float,
        nargs=3,
        default=[0.60, 0.08, 0.32],
        help="shares of time: pretraining, long rows, chat (0 leaves a stage out)",
    )
    parser.add_argument("--decay-from", type=float, default=DECAY_FROM)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--long-length", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--tiny", action="store_true", help="a toy shape, to try the script without a GPU"
    )
    parser.add_argument("--max-steps", type=int, default=0, help="per stage, to try the script")
    Trainer(parser.parse_args()).train()


if __name__ == "__main__":
    main()
