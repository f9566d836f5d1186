"""Compares the training model with transformers on a CPU: logits, packed documents, checkpoints.

python training/check_model.py [--model CHECKPOINT]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from delta_rule import delta_rule_torch
from model import Model, Pieces, Shape, linear, rms_norm
from train import load_weights, save
from transformers import Qwen3_5ForCausalLM

TOLERANCE = 1e-4


def main() -> None:
    """Raises if the two models differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint to check (default: random weights)")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Model(Shape(), pieces=Pieces(compiled=False), delta_rule=delta_rule_torch)
    if args.model:
        model.load(load_weights(args.model))
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for parameter in model.table.values():
            if not args.model and parameter.ndim == 1 and parameter.shape[0] > 8:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            parameter.copy_(parameter.bfloat16())  # what a checkpoint holds
        save(model, Path(folder), {})
        model.load(load_weights(Path(folder)))
        other = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.randint(0, model.shape.vocab, (2, 203))
        whole = (model.logits(ids, dtype=torch.float32) - other(ids).logits).abs().max()
        position = torch.cat([torch.arange(90), torch.arange(113)])[None].expand(2, -1)
        x = model.hidden(ids, position, dtype=torch.float32)
        x = rms_norm(x, 1.0 + model.table["model.norm.weight"], model.shape.eps)
        logits = linear(x, model.table["model.embed_tokens.weight"]).view(2, 203, -1)
        parts = torch.cat([other(ids[:, :90]).logits, other(ids[:, 90:]).logits], 1)
        packed = (logits - parts).abs().max()
    print(f"check_model: largest difference {whole:.2e}, of packed documents {packed:.2e}")
    assert max(whole, packed) < TOLERANCE


if __name__ == "__main__":
    main()
