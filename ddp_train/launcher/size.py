"""How many processes come next, and on which GPUs. Pure: no clock, no process, no file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

GIVEN_UP_AFTER = 2
"""Failures of one rank, or its GPU, without a new checkpoint between them: it was replaced once,
and failed again."""
OF_CUDA = ("CUDA error", "CUDA driver", "CUDA-capable")
"""What an error says that comes from a GPU, or its driver."""


@dataclass(frozen=True)
class Change:
    """Of the number of processes."""

    before: int
    after: int
    why: str
    at: float
    """When it was asked for, or when the rank was lost, by `time.monotonic`."""
    time: float
    """The same by `time.time`."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "from": self.before,
            "to": self.after,
            "why": self.why,
            "at": self.at,
            "time": self.time,
        }


@dataclass
class Size:
    """The number of processes, and what is known of their GPUs."""

    count: int
    counts: Sequence[int] = ()
    """Those that it may become, ascending; none: it stays."""
    gpus: Sequence[str] = ()
    """All that there are, as CUDA_VISIBLE_DEVICES names them; none on the CPU."""
    given_up: list[str] = field(default_factory=list)
    """The GPUs that the run no longer uses."""
    failures: Counter[str] = field(default_factory=Counter)
    """Of a GPU, or on the CPU of a rank, since the last new checkpoint."""

    def devices(self) -> list[str]:
        """The GPU of each rank; none on the CPU. One that was given up is tried again if the others
        are too few."""
        last = [*(gpu for gpu in self.gpus if gpu not in self.given_up), *self.given_up]
        chosen = last[: self.count]
        return [gpu for gpu in self.gpus if gpu in chosen]

    def refusal(self, count: int) -> str:
        """Why the number cannot be that; empty if it can."""
        if count not in self.counts:
            return f"it may have {shown_counts(self.counts)}"
        if self.gpus and count > len(self.gpus):
            return f"each needs a GPU, and there are {len(self.gpus)}"
        return ""

    def become(self, count: int) -> None:
        """As was asked for."""
        self.count = count
        self.failures.clear()
        if count > len(self.gpus) - len(self.given_up):
            self.given_up.clear()

    def shrink(self, rank: int | None, progressed: bool, gone: Collection[str] = ()) -> str:
        """After a failure: becomes smaller, or takes other GPUs, if a rank has failed again in
        spite of a replacement, or if its GPU is gone. Returns why; empty if all stays as it is.

        rank: that failed for something that may be its GPU's. progressed: whether there is a new
        checkpoint since the failure before. gone: GPUs that the driver does not reach any more.
        """
        if progressed:
            self.failures.clear()
        devices = self.devices() or [str(one) for one in range(self.count)]
        lost = [device for device in devices if device in gone]
        why = f"GPU {lost[0]} is gone" if lost else ""
        if rank is not None:
            self.failures[devices[rank]] += 1
            if devices[rank] not in lost and self.failures[devices[rank]] >= GIVEN_UP_AFTER:
                lost.append(devices[rank])
                what = f"rank {rank}" + (f" (GPU {devices[rank]})" if self.gpus else "")
                why = why or f"{what} failed {GIVEN_UP_AFTER} times at the same place"
        if self.gpus:
            there = len({*self.gpus} - {*self.given_up, *lost})
        else:
            there = self.count - len(lost)
        fitting = [count for count in self.counts if count <= min(self.count, there)]
        if not lost or not fitting:
            return ""
        self.count = fitting[-1]
        self.failures.clear()
        if self.gpus:
            self.given_up += [gpu for gpu in lost if gpu not in self.given_up]
        return why


def is_of_device(failure: dict[str, Any], by_signal: bool) -> bool:
    """Whether a failure may be that of the rank's GPU, or of what it shares its memory with: then a
    replacement may fail too, and others need not. failure: failure.json. by_signal: whether the
    process was killed by one."""
    kind = failure.get("kind")
    detail = str(failure.get("detail", ""))
    if kind == "exception":
        return failure.get("phase") == "start" or any(words in detail for words in OF_CUDA)
    return kind == "oom" or (kind == "died" and by_signal)


def shown_counts(counts: Sequence[int]) -> str:
    """`2 to 8 processes`; `2, 4 or 8 processes`."""
    if list(counts) == list(range(counts[0], counts[-1] + 1)) and len(counts) > 2:
        return f"{counts[0]} to {counts[-1]} processes"
    *most, last = map(str, counts)
    if most:
        return f"{', '.join(most)} or {last} processes"
    return f"{last} processes"
