"""The order of an epoch's samples, where a sampler of the user's draws it, compared between the
processes."""

from __future__ import annotations

from ddp_train.data.batch_plan import BatchPlan, NumberedEpochs
from ddp_train.errors import DataError

SAME_DRAWS = (
    "let it draw from torch's, numpy's or Python's global generators, which are seeded in the same"
    " way before each epoch, or from a generator of its own with a fixed seed; it must not depend"
    " on the rank or the time"
)


class OrderCheck:
    """Sends a digest of an epoch's order along with the losses: no exchange of its own.

    Each process trains on its part of the order that it has drawn itself: of two orders some
    samples would be trained on twice, and others never.
    """

    def __init__(self, sampled: NumberedEpochs, epoch: int) -> None:
        self.sampled = sampled
        self.epoch = epoch

    def collect(self) -> list[float]:
        return [float(self.sampled.digest(self.epoch))]

    def deliver(self, of_ranks: list[list[float]]) -> None:
        """Raise DataError, on all processes, if they have drawn different orders."""
        digests = [int(digest) for (digest,) in of_ranks]
        if len(set(digests)) == 1:
            return
        table = ", ".join(f"rank {rank}: {digest:x}"[:16] for rank, digest in enumerate(digests))
        sampler = f"{self.sampled.option}: {self.sampled.name}"
        raise DataError(
            f"{sampler} gives other numbers on each process in epoch {self.epoch + 1} ({table})",
            SAME_DRAWS,
        )


def order_checks(plan: BatchPlan, step: int) -> list[OrderCheck]:
    """The check of the epoch that the last of `step` steps was in; none without a sampler."""
    if plan.sampled is None or not step:
        return []
    return [OrderCheck(plan.sampled, (step - 1) // plan.steps_per_epoch)]
