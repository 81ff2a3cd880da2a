"""Tensors of any number, shape and dtype between processes, and texts, as bytes; nothing is
pickled."""

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
_SHORT = 504
"""Bytes of a text that travel beside its length."""


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
    headers = from_bytes(header_bytes, _sizes(header_bytes))
    contents = from_bytes(content, _sizes(content))
    received = []
    for header_of_rank, content_of_rank in zip(headers, contents, strict=True):
        facts_of_rank, layout_of_rank = json.loads(bytes(header_of_rank.tolist()))
        received.append((facts_of_rank, _split(content_of_rank, layout_of_rank)))
    return received


def texts_from_all_ranks(text: str, device: str) -> list[str]:
    """The text of rank 0, 1, ... One collective, two if one of them is long."""
    content = text.encode()
    row = len(content).to_bytes(8, "little") + content[:_SHORT].ljust(_SHORT, b"\0")
    rows = from_all_ranks(_on_device(row, device)).cpu().numpy()
    sizes = [int.from_bytes(row[:8].tobytes(), "little") for row in rows]
    contents = [row[8 : 8 + size].tobytes() for row, size in zip(rows, sizes, strict=True)]
    if max(sizes) > _SHORT:
        whole = from_bytes(_on_device(content, device), sizes)
        contents = [part.cpu().numpy().tobytes() for part in whole]
    return [content.decode() for content in contents]


def from_bytes(content: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The bytes of rank 0, 1, ..., uint8 [n] each. One collective.

    content: of this rank.
    sizes: n of each rank.
    """
    largest = max(1, *sizes)  # no collective takes nothing
    padded = content.new_zeros(_aligned(largest))
    padded[: len(content)] = content
    contents = from_all_ranks(padded)
    return [part[:size] for part, size in zip(contents, sizes, strict=True)]


def bytes_of(tensor: Tensor) -> Tensor:
    """The content of a tensor, uint8 [n]."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


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
    content = bytes_of(tensor.to(device))
    return pad(content, (0, _aligned(len(content)) - len(content)))


def _sizes(content: Tensor) -> list[int]:
    """The number of bytes of each rank."""
    return from_all_ranks(torch.tensor(len(content), device=content.device)).tolist()


def _on_device(content: bytes, device: str) -> Tensor:
    # Zero more, since frombuffer refuses an empty one.
    return torch.frombuffer(bytearray(content + b"\0"), dtype=torch.uint8)[:-1].to(device)
