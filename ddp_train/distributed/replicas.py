"""A check that all processes still have the same weights. DDP exchanges gradients, and would not
notice."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

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
    if ranks() == 1:
        return
    parameters = measured_parameters(module)
    if parameters:
        check_norms([*parameters], from_all_ranks(norms_of(parameters.values())))


def measured_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters whose norms are compared, by their names: none of whole numbers or of 8
    bits."""
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() and parameter.itemsize > 1
    }


def weight_with_nan(module: nn.Module) -> str:
    """The name of the first trained weight that holds a NaN; "" if none does."""
    measured = measured_parameters(module)
    trained = {name: item for name, item in measured.items() if item.requires_grad}
    flags = norms_of(trained.values()).isnan().tolist()
    return next((name for name, flag in zip(trained, flags, strict=True) if flag), "")


@torch.no_grad()
def norms_of(parameters: Iterable[Tensor]) -> Tensor:
    """The norms of parameters: [n], float64."""
    parameters = list(parameters)
    if not parameters:
        return torch.empty(0, dtype=torch.float64)
    norms = torch._foreach_norm(parameters, 2)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).double()


def check_norms(names: list[str], norms_of_ranks: Tensor) -> None:
    """Compare norms of parameters.

    norms_of_ranks: [ranks, n], of `norms_of`.

    Raises ModelError with the name of the parameter that differs most.
    """
    if not names:
        return
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
        "look for code outside of the optimizer that changes them on one process alone, or by"
        " random numbers: a hook, an assignment in forward or, with strategy.init_sync=false, the"
        " model's constructor",
    )
