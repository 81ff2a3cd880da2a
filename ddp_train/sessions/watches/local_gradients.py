"""Gradients that a loop takes by itself of a mean loss, which are those of one process."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from ddp_train.distributed.training_step import CURRENT

LOCAL_GRADIENTS = (
    "torch.autograd.grad took gradients of a loss of run.mean. They are the gradients of this"
    " process alone, so they depend on the number of processes. For the gradients over all"
    " processes use run.sum(gradient) / run.processes; loss.backward() does this by itself"
)
log = logging.getLogger(__name__)


class LocalGradients:
    """Tells of the first step whether such gradients stay those of one process."""

    def __init__(self) -> None:
        self.are_alone = False
        """Some were taken, and nothing was added up since."""
        self.gathers = 0
        """Calls of `all_gather` before they were taken."""

    def see_grad(self) -> None:
        """Called when gradients are taken."""
        self.are_alone = True
        self.gathers = CURRENT.gathers

    def see_sum(self, value: Any) -> None:
        """Called when a value is added up, or gathered, over all processes."""
        if isinstance(value, Tensor | list | tuple):  # a number is a loss or a count, for a log
            self.are_alone = False

    def warn(self) -> None:
        """Say what was found, if there is something. To be called at the end of the step."""
        if self.are_alone and self.gathers == CURRENT.gathers:
            log.warning(LOCAL_GRADIENTS)
