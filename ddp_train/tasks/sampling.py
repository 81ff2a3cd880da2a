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
    prompt: Sequence[int],
    count: int,
    context: int,
    vocabulary: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """Draw the tokens that follow a prompt, each from what the model expects behind the last ones.

    The draws are keyed by seed and place, in float64: they differ between two models only where
    these differ. The whole context is computed anew for each token: simple, and fast enough for a
    page of text. The model is left in eval mode.

    count: tokens to draw.
    context: the most tokens that the model is given.
    vocabulary: tokens from here on, with which a model may round its outputs up, are never drawn.
    """
    model.eval()
    device = next(model.parameters()).device
    draws = uniform(hash_key(seed, "sample"), torch.arange(count), 1)
    tokens = [*prompt]
    for draw in draws:
        ids = torch.tensor([tokens[-context:]], device=device)
        outputs = one_tensor(model(ids))
        logits = outputs[0, -1, :vocabulary].double().cpu()
        cumulative = (logits / temperature).softmax(-1).cumsum(-1)
        token = torch.searchsorted(cumulative, draw).clamp(max=len(cumulative) - 1)
        tokens.append(int(token))
    return tokens[len(prompt) :]
