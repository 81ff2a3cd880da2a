"""Buffers of a model, compared between processes: which differ, and which of these may."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ddp_train.distributed.replicas import TOLERANCE


@dataclass(frozen=True)
class BufferOfRanks:
    """A floating-point buffer as all processes have it."""

    name: str
    owner: nn.Module
    values: Tensor
    """[ranks, n], float64."""


def buffers_apart(module: nn.Module, of_ranks: Tensor) -> list[BufferOfRanks]:
    """The floating-point buffers that differ between processes in any bit.

    of_ranks: all of them in a row, [ranks, n], as `averaged_buffers` gives them.
    """
    both_are_nan = of_ranks.isnan() & of_ranks[0].isnan()
    differs = ((of_ranks != of_ranks[0]) & ~both_are_nan).any(0)
    if not bool(differs.any()):
        return []
    buffers = []
    first = 0
    for name, buffer in module.named_buffers():
        if not buffer.is_floating_point():
            continue
        end = first + buffer.numel()
        if bool(differs[first:end].any()):
            owner = module.get_submodule(name.rpartition(".")[0])
            buffers.append(BufferOfRanks(name, owner, of_ranks[:, first:end]))
        first = end
    return buffers


def is_statistic(buffer: BufferOfRanks) -> bool:
    """True for the statistics of a norm, which the user may choose to differ."""
    return isinstance(buffer.owner, _NormBase)


def is_batch_norm_apart(buffer: BufferOfRanks) -> bool:
    """True for the statistics of a batch norm, if they differ by more than rounding."""
    spread = (buffer.values - buffer.values[0]).abs().max()
    largest = buffer.values.abs().max()
    return isinstance(buffer.owner, _BatchNorm) and bool(spread > TOLERANCE * largest)
