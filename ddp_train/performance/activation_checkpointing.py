"""Activation checkpointing: blocks of a model keep their inputs alone, and compute the rest again
in the backward pass.

For memory, not for speed: a third more arithmetic buys a larger batch or model (Chen et al.,
arXiv:1604.06174).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_train.errors import ConfigError
from ddp_train.text import shown


def checkpoint_blocks(model: nn.Module, classes: list[str]) -> None:
    """Make the outermost modules of these classes compute their activations again.

    Names in checkpoints stay. Gradients are the same, dropout included, and buffers change once.

    Raises ConfigError if the model has no module of one of the classes.
    """
    counts = Counter(type(module).__name__ for module in model.modules())
    for name in classes:
        if name not in counts:
            raise ConfigError(
                [
                    f"tuning.activation_checkpointing={shown(classes)}: the model has no module of"
                    f" class {name}; it has {_blocks_of(model, counts)}"
                ]
            )
    for block in dict.fromkeys(_outermost(model, classes)):  # one may stand in two places
        block.__class__ = _recomputing(type(block))


def _blocks_of(model: nn.Module, counts: Counter[str]) -> str:
    """The classes of modules with children, the most frequent first."""
    blocks = {type(module).__name__ for module in model.modules() if any(module.children())}
    names = [f"{name} ({count})" for name, count in counts.most_common() if name in blocks]
    return ", ".join(names) or "no blocks"


def without_recomputation(model: nn.Module) -> None:
    """Undo `checkpoint_blocks`."""
    for module in model.modules():
        if getattr(type(module), "recomputes", False):
            module.__class__ = type(module).__bases__[0]


def _outermost(module: nn.Module, classes: list[str]) -> Iterator[nn.Module]:
    if type(module).__name__ in classes:
        yield module
    else:
        for child in module.children():
            yield from _outermost(child, classes)


def _recomputing(cls: type[nn.Module]) -> type[nn.Module]:
    """The class with another `forward`. Not the object: DataParallel's replicas would all call that
    of the first."""

    def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *inputs, **named)
        if torch.compiler.is_compiling():
            # The compiler itself keeps what changes a buffer out of the backward pass.
            return checkpoint(cls.forward, self, *inputs, use_reentrant=False, **named)
        contexts = contextlib.nullcontext(), _EarlierBuffers(self)
        return checkpoint(
            cls.forward, self, *inputs, use_reentrant=False, context_fn=lambda: contexts, **named
        )

    return type(cls.__name__, (cls,), {"forward": forward, "recomputes": True})


class _EarlierBuffers:
    """A context in which a block has the buffers of when the context was made.

    So the second forward pass starts from those of before the first: in its own, batch norm would
    count the batch again (pytorch#96136). It may be entered for each backward pass.
    """

    def __init__(self, block: nn.Module) -> None:
        self.before = [
            (part, _copies(dict(part.named_buffers(recurse=False)))) for part in block.modules()
        ]
        self.current: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        self.current = [dict(part._buffers) for part, _ in self.before]
        for part, buffers in self.before:
            part._buffers.update(_copies(buffers))

    def __exit__(self, *raised: object) -> None:
        for (part, _), buffers in zip(self.before, self.current, strict=True):
            part._buffers.update(buffers)


def _copies(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in buffers.items()}
