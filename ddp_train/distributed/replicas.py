"""A check that all processes still have the same weights. DDP exchanges gradients, and would not
notice."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddp_train.distributed.process_group import from_all_ranks, ranks
from ddp_train.errors import ModelError
from ddp_train.linux import processor_name

TOLERANCE = 1e-4
"""Relative difference of a norm. Processors of other kinds may add up a gradient's norm in another
order, by which weights drift apart by some 1e-7 a step."""
TOLERANCE_OF_SUMS = {torch.float64: 1e-10}
"""By data type, relative to the norm: of sums in which each place has a factor of its own. On
processors of one kind equal updates give equal bits."""
OTHER_TYPES = 1e-6
FACTORS = 2**12
LEVELS = 4
"""Levels at which `FACTORS` numbers at a time become one: for up to 2**48 numbers."""
ROWS_AT_ONCE = 2**8
"""Rows of `FACTORS` numbers that are copied to float64 at a time: 8 MiB."""


@torch.no_grad()
def check_same_weights(module: nn.Module) -> None:
    """Compare each parameter, but for whole numbers and 8-bit floats. One all-gather.

    Raises ModelError, on all processes alike, with the name of the parameter that differs most.
    """
    if ranks() == 1:
        return
    parameters = measured_parameters(module)
    if not parameters:
        return
    names = [*parameters]
    tensors = [*parameters.values()]
    norms = norms_of(tensors)
    kind = norms.new_tensor([kind_of_processor(norms.device)])
    of_ranks = from_all_ranks(torch.cat([kind, norms, sums_of(tensors)]))
    kinds, norms_of_ranks, sums_of_ranks = of_ranks.split([1, len(names), len(names)], dim=1)
    check_norms(names, norms_of_ranks)
    if bool((kinds == kinds[0]).all()):
        allowed = [TOLERANCE_OF_SUMS.get(tensor.dtype, OTHER_TYPES) for tensor in tensors]
        check_sums(names, norms_of_ranks[0], sums_of_ranks, norms.new_tensor(allowed))


@functools.cache
def kind_of_processor(device: torch.device) -> float:
    """A number that is the same where the same work gives the same bits."""
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device)
    else:
        kind = f"{processor_name()}, {torch.get_num_threads()} threads"
    return float(zlib.crc32(f"{kind}, torch {torch.__version__}".encode()))


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Factors of a variance of 1: [LEVELS, FACTORS], float64, the same on all processes."""
    generator = torch.Generator("cpu").manual_seed(0)
    size = (LEVELS, FACTORS)
    drawn = torch.rand(size, generator=generator, dtype=torch.float64, device="cpu")
    return ((2 * drawn - 1) * math.sqrt(3)).to(device)


@torch.no_grad()
def sums_of(parameters: Iterable[Tensor]) -> Tensor:
    """A checksum of each parameter: the sum of its elements, each times a random factor.

    The factors have a variance of 1 and are the same on all processes. The sums of two tensors
    therefore differ by about the norm of their difference.

    parameters: n tensors of any shape and type.

    Returns [n], float64, on the device of the parameters.
    """
    return torch.stack([_sum_of(parameter.detach().flatten()) for parameter in parameters])


def _sum_of(values: Tensor) -> Tensor:
    """values: [n]. Returns a scalar, float64."""
    for factors in _factors(values.device):
        values = _sums_of_rows(values, factors)
        if len(values) == 1:
            break
    return values[0]


def _sums_of_rows(values: Tensor, factors: Tensor) -> Tensor:
    """Sum up rows of as many values as there are factors; the last row may be shorter.

    values: [n].

    Returns [rows], float64.
    """
    whole = len(values) // FACTORS
    rows = values[: whole * FACTORS].view(whole, FACTORS)
    sums = [part.double() @ factors for part in rows.split(ROWS_AT_ONCE)]
    rest = values[whole * FACTORS :].double()
    return torch.cat([*sums, (rest @ factors[: len(rest)])[None]])


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
    largest = _largest_difference(norms_of_ranks, norms_of_ranks[0], TOLERANCE)
    if largest is None:
        return
    of_leader = float(norms_of_ranks[0, largest.place])
    of_other = float(norms_of_ranks[largest.rank, largest.place])
    raise _apart(
        f"the norm of {names[largest.place]} is {of_leader:.6g} on rank 0 and {of_other:.6g} on"
        f" rank {largest.rank}"
    )


def check_sums(names: list[str], norms: Tensor, sums_of_ranks: Tensor, allowed: Tensor) -> None:
    """Compare sums of parameters.

    norms: those of rank 0, [n].
    sums_of_ranks: [ranks, n], of `sums_of`.
    allowed: largest difference of each, relative to its norm, [n].

    Raises ModelError with the name of the parameter that differs most.
    """
    largest = _largest_difference(sums_of_ranks, norms, allowed)
    if largest:
        raise _apart(
            f"{names[largest.place]} differs by about {largest.share:.0e} of its norm between rank"
            f" 0 and rank {largest.rank}"
        )


@dataclass(frozen=True)
class Difference:
    """A difference between rank 0 and another rank."""

    rank: int
    place: int
    """The number of the parameter."""
    share: float
    """Relative to the norm of the parameter."""


def _largest_difference(
    of_ranks: Tensor, scale: Tensor, allowed: Tensor | float
) -> Difference | None:
    """The largest difference from rank 0 beyond what is allowed; None if there is none.

    of_ranks: [ranks, n].
    scale: what differences are relative to, [n].
    allowed: largest share.
    """
    leader = of_ranks[0]
    are_same = (of_ranks == leader) | (of_ranks.isnan() & leader.isnan())
    shares = (of_ranks - leader).abs() / scale.clamp(min=1e-30)
    shares = shares.nan_to_num(nan=torch.inf).masked_fill(are_same, 0)
    shares = torch.where(shares > allowed, shares, 0)
    rank, place = divmod(int(shares.argmax()), of_ranks.shape[1])
    share = float(shares[rank, place])
    return Difference(rank, place, share) if share else None


def _apart(difference: str) -> ModelError:
    return ModelError(
        f"the weights are not the same on all processes: {difference}",
        "look for code outside of the optimizer that changes weights on one process alone, or by"
        " random numbers: a hook, an assignment in forward or, with strategy.init_sync=false,"
        " the model's constructor",
    )
