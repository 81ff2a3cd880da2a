"""Checks that the learning rates are the same on all processes, and after a resume."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ddp_train.distributed.process_group import from_all_ranks, ranks
from ddp_train.sessions.settings import UsageError

log = logging.getLogger(__name__)


def warn_of_fractions(objects: Mapping[str, Any]) -> None:
    """Name the schedulers that were stepped by a fraction of an epoch, in which a run resumes.

    `scheduler.step(epoch + number / batches)` follows a count that begins at 0 there.

    objects: those that run.resume got, by their names, as they were restored.
    """
    for name, value in objects.items():
        epochs = getattr(value, "T_cur", None)  # of CosineAnnealingWarmRestarts
        if isinstance(epochs, float) and not epochs.is_integer():
            log.warning(
                "%s was stepped by a fraction of an epoch. The run resumes inside of an epoch,"
                " where enumerate(loader) starts at 0 again, so that fraction would be wrong."
                " Use %s.step(run.step / batches), with batches = len(loader) before run.epochs",
                name,
                name,
            )


def check_same_rates(objects: Mapping[str, Any], device: str) -> None:
    """Compare the learning rates of all optimizers. A collective, of some numbers.

    objects: those that run.resume got, by their names.

    Raises UsageError, on all processes alike, with two of the rates that differ.
    """
    if ranks() == 1:
        return
    rates = {
        f"{name}.param_groups[{place}]['lr']": _number(group["lr"])
        for name, value in objects.items()
        if isinstance(value, Optimizer)
        for place, group in enumerate(value.param_groups)
    }
    if not rates:
        return  # the loop updates the weights by itself
    of_ranks = from_all_ranks(torch.tensor([*rates.values()], dtype=torch.float64, device=device))
    differs = (of_ranks != of_ranks[0]) & ~(of_ranks.isnan() & of_ranks[0].isnan())
    if not bool(differs.any()):
        return
    rank, place = divmod(int(differs.flatten().int().argmax()), len(rates))
    raise UsageError(
        f"the learning rate is not the same on all processes: {list(rates)[place]} is"
        f" {float(of_ranks[0, place]):g} on rank 0 and {float(of_ranks[rank, place]):g} on rank"
        f" {rank}",
        "give the scheduler the same score on all processes: score = run.sum(loss_sum) /"
        " run.sum(count), then scheduler.step(score)",
    )


def _number(rate: Any) -> float:
    """NaN for an optimizer that computes its rate itself."""
    return math.nan if rate is None else float(rate)
