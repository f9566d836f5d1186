"""What the draft heads are taught: the target's distribution at every step of a chain.

Owns: the loss. Every place of a batch whose next token belongs to a reply begins a chain; step k
of it is compared with what the target says k-1 places later, as long as that is in the reply.
A share of the target's distribution is moved onto its best token, which is what greedy drafts are
checked against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from draft_model import DraftHead, Rows
from model import linear
from torch import Tensor


@torch.no_grad()
def aims(hidden: Tensor, embed: Tensor, hard_share: float) -> Tensor:
    """The target's distributions [M, V], a share of each moved onto its best token."""
    logits = linear(hidden.to(embed.dtype), embed)
    best = logits.argmax(-1, keepdim=True)
    goal = logits.softmax(-1).mul_(1.0 - hard_share)
    return goal.scatter_add_(1, best, torch.full_like(best, 1, dtype=goal.dtype) * hard_share)


def draft_losses(
    heads: list[DraftHead],
    rows: Rows,
    is_goal: Tensor,
    embed: Tensor,
    *,
    num_steps: int,
    most: int,
    hard_share: float,
) -> list[Tensor]:
    """float32[num_steps] for each head: the mean loss of each step over the places that count.

    is_goal: bool[R, T], as in `TokenStore`. most: anchors used, drawn at random if there are more.
    """
    position, goal = rows.position.flatten(), is_goal.flatten()
    anchors = ((position > 0) & goal).nonzero()[:, 0]
    if len(anchors) > most:
        anchors = anchors[torch.randperm(len(anchors), device=anchors.device)[:most]]
    hidden = rows.hidden.flatten(0, 1)
    losses: list[list[Tensor]] = [[] for _ in heads]
    outputs = zip(*(head.steps(rows, embed, num_steps) for head in heads), strict=True)
    for k, outs in enumerate(outputs):
        place = (anchors + k).clamp_max(len(goal) - 1)
        counts = (goal[place] & (position[place] == position[anchors] + k)).float()
        aim = aims(hidden[place], embed, hard_share)
        for found, out in zip(losses, outs, strict=True):
            logits = linear(out[anchors].to(embed.dtype), embed)
            loss = F.cross_entropy(logits, aim, reduction="none")
            found.append((loss * counts).sum() / counts.sum().clamp_min(1.0))
    return [torch.stack(found) for found in losses]
