"""Tensors of any number, shape and dtype between processes, as bytes; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddp_train.distributed.process_group import from_all_ranks

_ALIGNED = 16
"""Bytes: the largest element of a tensor, complex128. A view as another type must begin at a
multiple of its size."""


def tensors_from_all_ranks(
    facts: Any, tensors: Sequence[Tensor], device: str
) -> list[tuple[Any, list[Tensor]]]:
    """The facts and tensors of rank 0, 1, ..., on `device`. Four collectives.

    facts: of this rank; anything that JSON can hold.
    tensors: of this rank; any number, of any shape and dtype.
    """
    layout = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    header = json.dumps([facts, layout]).encode()
    header_bytes = torch.tensor(list(header), dtype=torch.uint8, device=device)
    parts = [_aligned_bytes(tensor, device) for tensor in tensors]
    content = torch.cat([header_bytes.new_empty(0), *parts])
    headers = _bytes_from_all_ranks(header_bytes)
    contents = _bytes_from_all_ranks(content)
    received = []
    for header_of_rank, content_of_rank in zip(headers, contents, strict=True):
        facts_of_rank, layout_of_rank = json.loads(bytes(header_of_rank.tolist()))
        received.append((facts_of_rank, _split(content_of_rank, layout_of_rank)))
    return received


def _split(content: Tensor, layout: list[tuple[str, list[int]]]) -> list[Tensor]:
    """The tensors in `content`, uint8 [n]. layout: dtype and shape of each."""
    tensors = []
    start = 0
    for name, shape in layout:
        dtype = getattr(torch, name)
        size = torch.Size(shape).numel() * dtype.itemsize
        tensors.append(content[start : start + size].view(dtype).view(shape))
        start += _aligned(size)
    return tensors


def _aligned(size: int) -> int:
    """The next multiple of _ALIGNED."""
    return -(-size // _ALIGNED) * _ALIGNED


def _aligned_bytes(tensor: Tensor, device: str) -> Tensor:
    content = tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)
    return pad(content, (0, _aligned(len(content)) - len(content)))


def _bytes_from_all_ranks(content: Tensor) -> list[Tensor]:
    """content: uint8 [n]; n may differ between processes."""
    sizes = from_all_ranks(torch.tensor(len(content), device=content.device)).tolist()
    largest = max(1, *sizes)  # no collective takes nothing
    padded = content.new_zeros(_aligned(largest))
    padded[: len(content)] = content
    contents = from_all_ranks(padded)
    return [part[:size] for part, size in zip(contents, sizes, strict=True)]
