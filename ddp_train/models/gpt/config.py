"""The option model=gpt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ddp_train.options.key import key
from ddp_train.options.problem import Problem
from ddp_train.options.schema import ModelConfig, RequestedRun

_LAUNCH_BOUND_BLOCKS = 10**6
"""Layers times width squared: a block has twelve times its width squared parameters. GPT-2's
smallest has 7 million."""


_LAUNCH_BOUND_OPERATIONS = 10**12
"""Operations of a step, six for each parameter of a block and token. 6 x 384 with 65,536 tokens has
4.2e12, takes 65 ms on an H200 if it is only captured, and 37 if it is compiled:
docs/inside/decisions.md."""


@dataclass
class GptConfig(ModelConfig):
    """GPT-2: a decoder-only transformer. Its context is data.length, its vocabulary that of the
    data."""

    name: str = "gpt"
    implementation: ClassVar[str] = "ddp_train.models.gpt.network:build_gpt"
    takes_images: ClassVar[bool | None] = False
    takes_tokens: ClassVar[bool | None] = True
    layers: int = key(4, "number of blocks", at_least=1)
    heads: int = key(4, "attention heads of a block; they divide the width", at_least=1)
    width: int = key(128, "features of a token", at_least=1)
    dropout: float = key(0.0, "dropout of embeddings, attention and residuals", at_least=0, below=1)
    vocabulary_multiple: int = key(
        64,
        "round the vocabulary up to a multiple, for faster matrix products: 50,257 to 50,304",
        at_least=1,
    )

    def is_launch_bound(self, units: float) -> bool:
        blocks = self.layers * self.width**2
        return blocks < _LAUNCH_BOUND_BLOCKS and 6 * 12 * blocks * units < _LAUNCH_BOUND_OPERATIONS

    def worth_compiling(self) -> bool:
        return True

    def has_batch_norm(self) -> bool:
        return False

    def problems(self, run: RequestedRun) -> Iterator[Problem]:
        yield from super().problems(run)
        if self.width % self.heads:
            nearest = self.width // self.heads * self.heads or self.heads
            yield Problem(
                f"model.width={self.width}",
                f"must be a multiple of model.heads={self.heads}",
                f"use model.width={nearest}",
            )
