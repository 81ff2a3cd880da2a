"""A check that all processes still have the same weights. DDP exchanges gradients, and would not
notice."""

from __future__ import annotations

import torch
from torch import nn

from ddp_train.distributed.process_group import from_all_ranks, ranks
from ddp_train.errors import ModelError

TOLERANCE = 1e-4
"""Relative difference of a norm. Hosts with other processors may add up a gradient's norm in
another order, by which weights drift apart by some 1e-7 a step."""


@torch.no_grad()
def check_same_weights(module: nn.Module) -> None:
    """Compare the norm of each parameter, but for whole numbers and 8-bit floats. One all-gather.

    Raises ModelError, on all processes alike, with the name of the parameter that differs most.
    """
    parameters = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() and parameter.itemsize > 1
    }
    if ranks() == 1 or not parameters:
        return
    names = list(parameters)
    norms = torch._foreach_norm(list(parameters.values()), 2)  # pyright: ignore[reportPrivateImportUsage]
    norms_of_ranks = from_all_ranks(torch.stack([norm.double() for norm in norms]))
    leader = norms_of_ranks[0]
    are_same = (norms_of_ranks == leader) | (norms_of_ranks.isnan() & leader.isnan())
    relative = (norms_of_ranks - leader).abs() / leader.clamp(min=1e-30)
    differences = relative.nan_to_num(nan=torch.inf).masked_fill(are_same, 0)
    rank, place = divmod(int(differences.argmax()), len(names))
    if not float(differences[rank, place]) > TOLERANCE:
        return
    raise ModelError(
        f"the weights are not the same on all processes: the norm of {names[place]} is"
        f" {float(leader[place]):.6g} on rank 0 and {float(norms_of_ranks[rank, place]):.6g} on"
        f" rank {rank}",
        "look for code beside the optimizer that changes them on one process alone, or by random"
        " numbers: a hook, an assignment in forward, with strategy.init_sync=false the model's"
        " constructor",
    )
