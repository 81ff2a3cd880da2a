"""A step of the user's loop that has begun."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.sessions.position import Place
from ddp_train.sessions.settings import UsageError
from ddp_train.text import counted


class StepRows(NamedTuple):
    """The samples of a step, and what their keyed draws depend on: see data/keyed_noise.py."""

    seed: int
    epoch: int
    step: int
    indices: np.ndarray
    """Sample numbers of the batch that begins the step, the first loader's of several."""
    num_real: int


class StatefulLoader(Protocol):
    """A loader that is trained on."""

    place: Place

    @property
    def facts(self) -> dict[str, Any]: ...

    @property
    def parts(self) -> list[Any]: ...

    def begin_epoch(self, epoch: int) -> None: ...

    def state(self) -> dict[str, Any]: ...


class OpenStep:
    """A step that has begun: the batches that loaders gave in it."""

    def __init__(self) -> None:
        self.shares: dict[int, MicroBatch] = {}
        """This process's share of each loader's last batch, by the `id` of the loader."""
        self.places: list[Place] = []
        """The places of the loaders, once for each batch."""
        self.all_have_samples = True
        """Every process has a sample of each batch."""
        self.samples = 0
        """This process's samples of the batch that began it."""
        self.without_samples = contextlib.ExitStack()
        """The context of a batch that is empty here."""

    def add(self, loader: StatefulLoader, place: Place, share: MicroBatch) -> None:
        """Add a batch. loader, place: the loader that gives it, and where it is."""
        if not self.shares:
            self.samples = share.num_real
        self.shares[id(loader)] = share
        self.places.append(place)
        self.all_have_samples &= share.all_have_samples

    def share_of(self, loader: StatefulLoader | None) -> MicroBatch:
        """This process's share of the batch of a loader.

        loader: None: the only one that there is.

        Raises UsageError if it gave none, or if there are several.
        """
        if loader is None:
            if len(self.shares) == 1:
                return next(iter(self.shares.values()))
            raise UsageError(
                f"run.mean: {counted(len(self.shares), 'loader')} gave batches in this step, so"
                " run.mean cannot tell to which samples the losses belong",
                "name the loader of these losses: run.mean(losses, of=loader)",
            )
        share = self.shares.get(id(loader))
        if share is None:
            raise UsageError(
                "run.mean: the loader that was given as of= gave no batch in this step",
                "take a batch of that loader in each step. If it ends too early, use"
                " run.loader(..., repeat=True), which starts again by itself (itertools.cycle"
                " would repeat earlier batches)",
            )
        return share


def check_one_for_each_sample(losses: Tensor, share: MicroBatch) -> None:
    """Raise UsageError unless there is one loss for each sample: [n], or [n, 1]."""
    samples = share.num_real
    if losses.shape == (samples,) or (losses.ndim and len(losses) == losses.numel() == samples):
        return
    cause = ""
    remedy = (
        "pass one loss for each sample (reduction='none'). For tokens or pixels use"
        " run.mean(losses, over=mask), or over=losses.numel() if all count"
    )
    if samples > 1 and losses.shape[:2] == (samples, samples):
        cause = (
            ". This is one loss for each pair of samples: outputs of shape [n, 1] were compared"
            " with targets of shape [n]"
        )
    elif losses.numel() < samples:
        remedy = (
            "pass one loss for each sample of the batch (reduction='none'). After a loop over parts"
            " of the batch, join their losses: run.mean(torch.cat(losses)). For tokens or pixels"
            " that a mask leaves use run.mean(losses, over=mask). For gradients of each sample, as"
            " in DP-SGD, use torch.autograd.grad and run.sum instead of run.mean"
        )
    raise UsageError(
        f"run.mean: the losses have the shape {list(losses.shape)}, but the batch has {samples}"
        f" samples{cause}",
        f"{remedy}. For one loss over the rows of all processes (ddp_train.all_gather), use"
        " run.mean(loss.expand(len(batch)))",
    )
