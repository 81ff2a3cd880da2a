"""What run.resume got, compared between processes: a checkpoint has what rank 0 has."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_train.distributed.exchange import texts_from_all_ranks

TOLERANCE = 1e-4
"""Relative. Hosts with other processors round differently, as in distributed/replicas.py."""

Numbers = dict[str, list[float]]
"""One or two numbers for each tensor or number of a state, by its name."""


def numbers_apart(objects: Mapping[str, Any], device: str) -> list[str]:
    """The names of what is not the same on all processes. A collective.

    Statistics of norms are left out, of which `is_batch_norm_apart` tells more, and bytes, as the
    states of generators are.

    objects: what run.resume got beside models. Optimizers and schedules follow from the gradients,
        which all processes share.
    """
    numbers: Numbers = {}
    for name, holder in objects.items():
        if not isinstance(holder, Optimizer | LRScheduler):
            numbers |= dict(_numbers_in(name, _state_of(holder)))
    of_ranks = [json.loads(text) for text in texts_from_all_ranks(json.dumps(numbers), device)]
    names = dict.fromkeys(name for of_rank in of_ranks for name in of_rank)
    return [name for name in names if not are_same([of_rank.get(name) for of_rank in of_ranks])]


def _state_of(holder: Any) -> Any:
    state = holder.state_dict()
    if not isinstance(holder, nn.Module) or not isinstance(state, Mapping):
        return state
    norms = {name for name, part in holder.named_modules() if isinstance(part, _NormBase)}
    return {name: value for name, value in state.items() if name.rpartition(".")[0] not in norms}


def _numbers_in(name: str, value: Any) -> Iterator[tuple[str, list[float]]]:
    if isinstance(value, Tensor):
        if value.dtype != torch.uint8 and value.numel() and value.layout == torch.strided:
            yield name, numbers_of(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers_in(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _numbers_in(f"{name}[{place}]", item)
    elif isinstance(value, int | float):
        yield name, [float(value)]


@torch.no_grad()
def numbers_of(tensor: Tensor) -> list[float]:
    """The norm of a tensor, and a sum in which places have unequal weights."""
    flat = tensor.detach().reshape(-1)
    flat = flat.abs().double() if flat.is_complex() else flat.double()
    weights = torch.linspace(1, 2, len(flat), dtype=torch.float64, device=flat.device)
    return torch.stack([flat.norm(), flat @ weights]).tolist()


def are_same(of_ranks: list[list[float] | None]) -> bool:
    """True if all ranks have the same numbers, to rounding. None: a rank has none of the name."""
    first = of_ranks[0]
    if first is None:
        return False
    return all(
        other is not None
        and len(other) == len(first)
        and all(map(_is_close, first, other, [abs(first[0])] * len(first)))
        for other in of_ranks
    )


def _is_close(one: float, other: float, scale: float) -> bool:
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) <= TOLERANCE * scale
    return one == other or (math.isnan(one) and math.isnan(other))
