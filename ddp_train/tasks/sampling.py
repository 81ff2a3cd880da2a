"""Text that a language model writes, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ddp_train.data.rng import hash_key, uniform
from ddp_train.tasks.supervised import one_tensor


@torch.no_grad()
def write_tokens(
    model: nn.Module,
    first: Sequence[int],
    count: int,
    context: int,
    vocabulary: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """`count` tokens that follow those of `first`, each drawn from what the model expects behind
    the last `context`.

    The draws are keyed by seed and place, in float64: they differ between two models only where
    these differ. Tokens from `vocabulary` on, with which a model may round its outputs up, are
    never drawn. The whole context is computed anew for each token: simple, and fast enough for a
    page of text. The model is left in eval mode.
    """
    model.eval()
    device = next(model.parameters()).device
    draws = uniform(hash_key(seed, "sample"), torch.arange(count), 1)
    written = [*first]
    for draw in draws:
        ids = torch.tensor([written[-context:]], device=device)
        logits = one_tensor(model(ids))[0, -1, :vocabulary].double().cpu()
        chances = (logits / temperature).softmax(-1).cumsum(-1)
        written.append(int(torch.searchsorted(chances, draw).clamp(max=len(chances) - 1)))
    return written[len(first) :]
