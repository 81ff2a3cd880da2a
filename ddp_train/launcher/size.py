"""The number of processes of a run, and their GPUs, as values. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """The number of processes, the numbers that it may become, and the GPUs that there are."""

    count: int
    counts: Sequence[int] = ()
    """The numbers that it may become, ascending; empty: it stays."""
    gpus: Sequence[str] = ()
    """All GPUs, as CUDA_VISIBLE_DEVICES names them; empty on the CPU."""
    given_up: Sequence[str] = ()
    """The GPUs that the run no longer uses."""

    def gpus_in_use(self) -> list[str]:
        """The GPU of each rank; empty on the CPU.

        A GPU that was given up is used again if the others are too few.
        """
        kept = [gpu for gpu in self.gpus if gpu not in self.given_up]
        chosen = [*kept, *self.given_up][: self.count]
        return [gpu for gpu in self.gpus if gpu in chosen]

    def device_of(self, rank: int) -> str:
        """The GPU of a rank; on the CPU the rank."""
        if self.gpus:
            return self.gpus_in_use()[rank]
        return str(rank)

    def refusal(self, count: int) -> str:
        """Why there cannot be `count` processes; empty if there can."""
        if count not in self.counts:
            return f"the run may have {shown_counts(self.counts)}"
        if self.gpus and count > len(self.gpus):
            return f"each process needs a GPU, and there are {len(self.gpus)} GPUs"
        return ""

    def resized(self, count: int) -> Size:
        """The size after a request. GPUs that were given up are tried again if all are needed."""
        is_short_of_gpus = count > len(self.gpus) - len(self.given_up)
        given_up = () if is_short_of_gpus else self.given_up
        return dataclasses.replace(self, count=count, given_up=given_up)

    def without(self, devices: Collection[str]) -> Size | None:
        """The largest size that does without some devices, at most the present one.

        None if no allowed number is that small.
        """
        if self.gpus:
            left = len({*self.gpus} - {*self.given_up, *devices})
        else:
            left = self.count - len(devices)
        fitting = [count for count in self.counts if count <= min(self.count, left)]
        if not fitting:
            return None
        given_up = self.given_up
        if self.gpus:
            given_up = (*given_up, *(gpu for gpu in devices if gpu not in given_up))
        return dataclasses.replace(self, count=fitting[-1], given_up=given_up)


@dataclass(frozen=True)
class Change:
    """A change of the number of processes."""

    before: int
    after: int
    why: str
    at: float
    """When it was asked for, or when the rank was lost, by `time.monotonic`."""
    time: float
    """The same moment by `time.time`."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "from": self.before,
            "to": self.after,
            "why": self.why,
            "at": self.at,
            "time": self.time,
        }


def shown_counts(counts: Sequence[int]) -> str:
    """`2 to 8 processes`; `2, 4 or 8 processes`."""
    is_range = list(counts) == list(range(counts[0], counts[-1] + 1))
    if is_range and len(counts) > 2:
        return f"{counts[0]} to {counts[-1]} processes"
    *others, last = map(str, counts)
    if others:
        return f"{', '.join(others)} or {last} processes"
    return f"{last} processes"
