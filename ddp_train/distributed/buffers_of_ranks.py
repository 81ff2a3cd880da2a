"""Buffers of a model, compared between processes: which differ, and which of these may."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ddp_train.distributed.exchange import bytes_of
from ddp_train.distributed.process_group import from_all_ranks, ranks
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


def whole_numbers_apart(module: nn.Module, device: str) -> list[str]:
    """The names of the buffers without floating point that differ between processes: counts, flags,
    places in a queue.

    One collective on `device`. Counts of norms are left out.
    """
    if ranks() == 1:
        return []
    checksums = {
        name: zlib.crc32(bytes_of(buffer).cpu().numpy().tobytes())
        for name, buffer in module.named_buffers()
        if _is_counted(module, name, buffer)
    }
    if not checksums:
        return []
    of_ranks = from_all_ranks(torch.tensor([*checksums.values()], device=device))
    differs = (of_ranks != of_ranks[0]).any(0).tolist()
    return [name for name, is_apart in zip(checksums, differs, strict=True) if is_apart]


def _is_counted(module: nn.Module, name: str, buffer: Tensor) -> bool:
    owner = module.get_submodule(name.rpartition(".")[0])
    is_plain = buffer.layout == torch.strided and not buffer.is_quantized
    return is_plain and not buffer.is_floating_point() and not isinstance(owner, _NormBase)
