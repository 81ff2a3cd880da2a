"""What each rank alone knows, its buffers and its running loss, where hosts may be lost: they share
no memory, so each step carries them to all ranks.

Numbers of step s+1 are sent after its last forward pass, beside its gradients, and have arrived
before its update: who has completed s+1 has those of all ranks after s+1, and who fails in it still
has those after s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ddp_train.distributed.process_group import buffer_places, gather_later
from ddp_train.engine.loop import Job
from ddp_train.recovery.rank_state import (
    AVERAGE_OF_ONE,
    SLOTS,
    KnownState,
    is_intact_after_exchange,
)
from ddp_train.resilience.heartbeat import ROW_BYTES
from ddp_train.tasks.mean_loss import Mean

HEAD = 2
"""Count of numbers before those of the buffers: the sum and the units of the loss."""


class ExchangedState:
    """What a rank alone knows on the CPU, sent with each step.

    Each rank keeps the numbers of all for the last steps.
    """

    def __init__(self) -> None:
        self.places: list[tuple[dict[str, Tensor | None], str]] = []
        """Where the buffers are: a model may put new tensors in their place."""
        self.kept: dict[int, tuple[Tensor, list[Tensor]]] = {}
        """By step: [ranks, numbers] in float64, and the buffers of this rank."""

    @property
    def buffers(self) -> list[Tensor]:
        return [cast(Tensor, holder[name]) for holder, name in self.places]

    def reason_unavailable(self, job: Job) -> str:
        if job.stepper.device != "cpu":
            return "on GPUs NCCL ends a process before it could save"
        if job.strategy.buffers_differ:
            self.places = buffer_places(job.module)
        if SLOTS * sum(buffer.nbytes for buffer in self.buffers) > ROW_BYTES:
            return "its buffers are too large to be sent with each step"
        if any(
            buffer.layout != torch.strided or buffer.is_quantized or buffer.is_complex()
            for buffer in self.buffers
        ):
            return "a buffer of its model is no plain tensor"
        if job.stepper.average and any(buffer.is_floating_point() for buffer in self.buffers):
            return AVERAGE_OF_ONE
        if job.stepper.check_finite.skip:
            return "train.on_non_finite=skip takes back what was sent of a step"
        return ""

    def begin(self, job: Job) -> None:
        self.publish(job.step, Mean())()

    def publish(self, step: int, loss: Mean) -> Callable[[], None]:
        """Start to send the numbers of the step that is being computed. Returns a function that
        waits for those of all ranks."""
        # `LossPublisher` says it again if a loss was dropped, which other ranks need not do.
        if step in self.kept:
            return lambda: None
        own = [buffer.detach().clone() for buffer in self.buffers]
        floating = [buffer.double().flatten() for buffer in own if buffer.is_floating_point()]
        finish = gather_later(
            torch.cat([torch.tensor([loss.sum, loss.units], dtype=torch.float64), *floating])
        )

        def keep() -> None:
            self.kept[step] = finish(), own
            self.kept.pop(step - SLOTS, None)

        return keep

    def is_intact(self, job: Job, phase: str, of_peer: bool) -> bool:
        return is_intact_after_exchange(job, phase, of_peer)

    def roll_back(self, job: Job) -> None:
        """Nothing to do, as for `rank_state.PublishedState`."""

    def keep_losses(self, job: Job) -> None:
        """Nothing to do: they were sent."""

    def states_of_ranks(self, step: int) -> list[KnownState | None]:
        if step not in self.kept:
            return [None]
        gathered, own = self.kept[step]
        return [
            KnownState(Mean(*row[:HEAD].tolist()), _with_floating(own, row[HEAD:]))
            for row in gathered
        ]


def _with_floating(own: list[Tensor], numbers: Tensor) -> list[Tensor]:
    """A rank's buffers: those of whole numbers are the same on all ranks.

    own: the buffers of this rank.
    numbers: content of the rank's floating-point buffers, [n].
    """
    buffers = []
    start = 0
    for buffer in own:
        if buffer.is_floating_point():
            part = numbers[start : start + buffer.numel()]
            start += buffer.numel()
            buffers.append(part.view(buffer.shape).to(buffer.dtype))
        else:
            buffers.append(buffer)
    return buffers
