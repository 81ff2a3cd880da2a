"""Is a film review praise? Texts of different lengths, which the data set itself puts into batches;
a transformer.

First: python examples/get_reviews.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

PADDING = 0


class Reviews:
    """Film reviews: the numbers of the words, int64 [up to `longest`], and 0 or 1.

    Every fifth review tests. Of a long one the beginning and the end are read, where opinions
    stand.
    """

    classes = ("complaint", "praise")

    def __init__(self, train: bool, path: str = "data/reviews.npz", longest: int = 200) -> None:
        if not Path(path).exists():
            raise FileNotFoundError(f"{path} is missing: run python examples/get_reviews.py")
        with np.load(path) as held:
            ids, ends, labels, self.vocabulary = (
                held[name] for name in ("ids", "ends", "labels", "vocabulary")
            )
        self.ids = torch.from_numpy(ids.astype(np.int32))
        self.ends = [0, *ends.tolist()]
        self.numbers = [number for number in range(len(labels)) if (number % 5 > 0) == train]
        self.labels = labels[self.numbers]
        self.longest = longest

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number = self.numbers[index]
        words = self.ids[self.ends[number] : self.ends[number + 1]].long()
        if len(words) > self.longest:
            words = torch.cat([words[: self.longest // 2], words[-self.longest // 2 :]])
        return words, int(self.labels[index])

    def collate_fn(self, samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        """Padded to the longest of the batch: int64 [n, t], and labels [n]."""
        words, labels = zip(*samples, strict=True)
        return nn.utils.rnn.pad_sequence(list(words), True, PADDING), torch.tensor(labels)


class Reader(nn.Module):
    """Embeddings, one transformer block, and the mean over the words: [n, t] -> logits [n, 2]."""

    def __init__(
        self, vocabulary: int = 20_002, longest: int = 200, width: int = 32, heads: int = 1
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, PADDING)
        self.places = nn.Parameter(0.02 * torch.randn(longest, width))
        self.block = nn.TransformerEncoderLayer(
            width, heads, 2 * width, 0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Sequential(nn.Dropout(0.3), nn.LayerNorm(width), nn.Linear(width, 2))
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, words: Tensor) -> Tensor:
        padding = words == PADDING
        found = self.block(
            self.words(words) + self.places[: words.shape[1]], src_key_padding_mask=padding
        )
        counted = found.masked_fill(padding[..., None], 0.0).sum(1)
        return self.head(counted / (~padding).sum(1, keepdim=True).clamp(min=1))
