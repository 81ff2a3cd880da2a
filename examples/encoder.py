"""A pretrained encoder learns from 1,000 film reviews whether they praise. BERT, by the names that
its weights have.

First: python examples/get_encoder.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

PADDING = 0


class Reviews:
    """(numbers of the pieces, int64 [128]; 0 or 1), padded at the end."""

    classes = ("complaint", "praise")

    def __init__(self, train: bool, path: str = "data/review_pieces.npz") -> None:
        if not Path(path).exists():
            raise FileNotFoundError(f"{path} is missing: run python examples/get_encoder.py")
        with np.load(path) as held:
            part = slice(None, int(held["train"])) if train else slice(int(held["train"]), None)
            self.ids = torch.from_numpy(held["ids"][part].astype(np.int64))
            self.labels = held["labels"][part]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.ids[index], int(self.labels[index])


def _dense_and_norm(inputs: int, outputs: int) -> nn.ModuleDict:
    return nn.ModuleDict(
        {"dense": nn.Linear(inputs, outputs), "LayerNorm": nn.LayerNorm(outputs, 1e-12)}
    )


class Layer(nn.Module):
    """Attention and a network for each place, each added to its input and normalised
    (arXiv:1810.04805)."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        own = nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value")})
        self.attention = nn.ModuleDict({"self": own, "output": _dense_and_norm(width, width)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, inner)})
        self.output = _dense_and_norm(inner, width)
        self.heads = heads
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: [n, t, width]; mask: [n, 1, 1, t], true where a word is."""
        n, t, width = x.shape
        split = [
            self.attention["self"][name](x).view(n, t, self.heads, -1).transpose(1, 2)  # type: ignore[index,operator]
            for name in ("query", "key", "value")
        ]
        dropped = self.dropout if self.training else 0.0
        found = functional.scaled_dot_product_attention(*split, attn_mask=mask, dropout_p=dropped)
        x = self._joined(self.attention["output"], found.transpose(1, 2).reshape(n, t, width), x)
        return self._joined(self.output, functional.gelu(self.intermediate["dense"](x)), x)

    def _joined(self, part: nn.Module, found: Tensor, x: Tensor) -> Tensor:
        assert isinstance(part, nn.ModuleDict)
        return part["LayerNorm"](
            x + functional.dropout(part["dense"](found), self.dropout, self.training)
        )


class Encoder(nn.Module):
    """[n, t] -> logits [n, 2]: embeddings, six layers, the mean over the pieces, a linear head."""

    def __init__(
        self,
        vocabulary: int = 30_522,
        layers: int = 6,
        width: int = 384,
        heads: int = 12,
        longest: int = 512,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(vocabulary, width, PADDING),
                "position_embeddings": nn.Embedding(longest, width),
                "token_type_embeddings": nn.Embedding(2, width),
                "LayerNorm": nn.LayerNorm(width, 1e-12),
            }
        )
        blocks = nn.ModuleList(Layer(width, heads, 4 * width, dropout) for _ in range(layers))
        self.encoder = nn.ModuleDict({"layer": blocks})
        self.head = nn.Linear(width, 2)
        self.dropout = dropout
        for part in self.modules():  # as BERT begins, for the comparison without pretrained weights
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)

    def forward(self, pieces: Tensor) -> Tensor:
        mask = pieces != PADDING
        places = torch.arange(pieces.shape[1], device=pieces.device)
        look = self.embeddings
        x = look["word_embeddings"](pieces) + look["position_embeddings"](places)
        x = look["LayerNorm"](x + look["token_type_embeddings"](torch.zeros_like(pieces)))
        x = functional.dropout(x, self.dropout, self.training)
        blocks = self.encoder["layer"]
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            x = block(x, mask[:, None, None])
        mean = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return self.head(mean)
