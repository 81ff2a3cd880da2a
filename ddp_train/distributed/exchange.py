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
    """For rank 0, 1, ... what it gave: facts that JSON can hold, and any number of tensors of any
    shape and dtype, on `device`. Four collectives."""
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = torch.tensor(list(json.dumps([facts, kinds]).encode()), dtype=torch.uint8, device=device)
    parts = [
        _aligned(tensor.detach().to(device).contiguous().view(-1).view(torch.uint8))
        for tensor in tensors
    ]
    content = torch.cat([text.new_empty(0), *parts])
    found = []
    for its_text, its_content in zip(
        _bytes_from_all_ranks(text), _bytes_from_all_ranks(content), strict=True
    ):
        its_facts, its_kinds = json.loads(bytes(its_text.tolist()))
        its_tensors = []
        start = 0
        for name, shape in its_kinds:
            dtype = getattr(torch, name)
            size = torch.Size(shape).numel() * dtype.itemsize
            its_tensors.append(its_content[start : start + size].view(dtype).view(shape))
            start += -(-size // _ALIGNED) * _ALIGNED
        found.append((its_facts, its_tensors))
    return found


def _aligned(content: Tensor) -> Tensor:
    return pad(content, (0, -len(content) % _ALIGNED))


def _bytes_from_all_ranks(content: Tensor) -> list[Tensor]:
    """content: uint8 [n]; n may differ between processes."""
    sizes = from_all_ranks(torch.tensor(len(content), device=content.device)).tolist()
    padded = content.new_zeros(
        -(-max(1, *sizes) // _ALIGNED) * _ALIGNED
    )  # no collective takes nothing
    padded[: len(content)] = content
    return [part[:size] for part, size in zip(from_all_ranks(padded), sizes, strict=True)]
