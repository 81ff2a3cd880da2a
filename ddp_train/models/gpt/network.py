"""GPT-2: a decoder-only transformer.

As Radford et al. describe it ("Language Models are Unsupervised Multitask Learners", 2019): layer
norm before attention and MLP, learned positions, GELU, one matrix for embedding and head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.errors import ConfigError, DataError

INITIAL_STD = 0.02
"""Standard deviation of all weights and embeddings, from GPT-2's code."""


class Attention(nn.Module):
    """Each token looks at itself and at those before it, in several heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, t, width] -> [n, t, width]."""
        n, t, width = tokens.shape
        heads = self.query_key_value(tokens).view(n, t, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [n, heads, t, width / heads] each
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        return self.projection(mixed.transpose(1, 2).reshape(n, t, width))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, dropout={self.dropout}"


class Mlp(nn.Module):
    """Two layers for each token by itself, the one between four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expansion = nn.Linear(width, 4 * width)
        self.projection = nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.projection(functional.gelu(self.expansion(tokens), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each added to its input.

    `tuning.activation_checkpointing=[Block]` recomputes it.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = Mlp(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.dropout(self.attention(self.attention_norm(tokens)))
        return tokens + self.dropout(self.mlp(self.mlp_norm(tokens)))


class Gpt(nn.Module):
    """A decoder-only transformer: ids, int64 [n, t] -> logits [n, t, vocabulary].

    t is at most the context.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float = 0.0,
        vocabulary_multiple: int = 1,
    ) -> None:
        """Draws the weights.

        context: the most tokens of a sample.
        vocabulary_multiple: the vocabulary is rounded up to a multiple of this. No token has the
            numbers that this adds; training makes them unlikely.
        """
        super().__init__()
        rounded = -(-vocabulary // vocabulary_multiple) * vocabulary_multiple
        self.context = context
        self.tokens = nn.Embedding(rounded, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                scale = 1.0
                if "projection" in name:
                    # Each block adds twice to the stream: so its variance does not grow with their
                    # number.
                    scale = 1 / math.sqrt(2 * layers)
                nn.init.normal_(parameter, std=INITIAL_STD * scale)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[1] > self.context:
            raise DataError(
                f"model=gpt has {self.context} positions, and a sample has {ids.shape[1]} tokens",
                f"cut samples to {self.context} tokens (data=text and data=tokens do so by"
                f" data.length={self.context})",
            )
        places = torch.arange(ids.shape[1], device=ids.device)
        embedded = self.tokens(ids) + self.positions(places)
        stream = self.blocks(self.dropout(embedded))
        return functional.linear(self.norm(stream), self.tokens.weight)


def build_gpt(shape: tuple[int, ...], outputs: int, **arguments: Any) -> Gpt:
    """A Gpt whose context is the length of a sample, and whose vocabulary is that of the data.

    Raises ConfigError if the samples are not rows of tokens.
    """
    if len(shape) != 1:
        problem = f"model=gpt: takes tokens, [n, t], and an input has the shape {['n', *shape]}"
        raise ConfigError([problem])
    return Gpt(outputs, shape[0], **arguments)
