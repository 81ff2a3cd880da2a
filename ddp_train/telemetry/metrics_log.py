"""Sums that stay on the device until somebody looks, and the file that keeps them: metrics.jsonl."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.distributed.process_group import from_all_ranks

METRICS = "metrics.jsonl"
log = logging.getLogger(__name__)

SeenLoss = float | Tensor
"""The sum of the sample losses of a forward pass: a number on CPU, where looking costs nothing; on a GPU, where looking
would wait for it, a detached tensor, a scalar or [replicas]."""


def is_finite(loss: SeenLoss) -> bool:
    """Whether it is neither NaN nor infinite. Waits for the device."""
    return bool(loss.isfinite().all()) if isinstance(loss, Tensor) else math.isfinite(loss)


class ExtraPayload(Protocol):
    """Numbers that travel with the losses, so that they need no exchange of their own."""

    def collect(self) -> list[float]:
        """Those of this process, on all ranks equally many."""
        ...

    def deliver(self, of_ranks: list[list[float]]) -> None:
        """What rank 0, 1, ... gave."""
        ...


class RunningLoss:
    """The losses since the last look. Adding costs no arithmetic and no synchronisation with the device."""

    def __init__(self) -> None:
        self.seen: list[tuple[SeenLoss, MicroBatch]] = []

    def add(self, loss: SeenLoss, micro_batch: MicroBatch) -> None:
        """The loss of a forward pass over these samples."""
        self.seen.append((loss, micro_batch))

    def of_step(self, step: int) -> list[tuple[SeenLoss, MicroBatch]]:
        """What was added in one optimizer step, if nobody looked since."""
        return [(loss, micro_batch) for loss, micro_batch in self.seen if micro_batch.step == step]

    def forget(self, step: int) -> None:
        """The losses of a step that was not taken."""
        self.seen = [(loss, micro_batch) for loss, micro_batch in self.seen if micro_batch.step != step]

    def first_bad_step(self, never: int) -> int:
        """The first optimizer step here with a loss that is not finite; `never` if there is none."""
        return min((micro_batch.step for loss, micro_batch in self.seen if not is_finite(loss)), default=never)

    def mean(self, device: str, extra: ExtraPayload | None = None) -> float:
        """The mean loss per sample over all processes, by one exchange; starts over.

        The sum is exact before it is rounded, so it does not depend on who computed which share.
        """
        given = extra.collect() if extra else []
        here = [sum(micro_batch.num_real for _, micro_batch in self.seen), *given]
        here += [
            loss if micro_batch.num_real else 0.0 for loss, micro_batch in self.seen if not isinstance(loss, Tensor)
        ]
        on_device = [
            (loss if micro_batch.num_real else torch.zeros_like(loss)).view(-1)  # a stand-in does not count
            for loss, micro_batch in self.seen
            if isinstance(loss, Tensor)
        ]
        numbers = torch.tensor(here, device=device, dtype=torch.float64)
        if on_device:
            numbers = torch.cat([numbers, torch.cat(on_device).double()])  # a short batch fills fewer replicas
        rows, first = from_all_ranks(numbers).tolist(), 1 + len(given)
        self.seen.clear()
        if extra:
            extra.deliver([row[1:first] for row in rows])
        samples = sum(row[0] for row in rows)  # none if every step of the interval was skipped
        return math.fsum(loss for row in rows for loss in row[first:]) / samples if samples else math.nan


class MetricsFile:
    """metrics.jsonl: a line per logging interval and per evaluation. Inactive on all ranks but one.

    What cannot be written is left out, with one warning; each later line is tried again.
    """

    def __init__(self, run_dir: Path, active: bool, first_step: int) -> None:
        """Lines of steps after `first_step` go: they are of a process that was lost, and come again."""
        self.path, self.active, self.warned = run_dir / METRICS, active, False
        self.kept: list[dict[str, Any]] = []
        """The lines that it begins with."""
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        """Called with each line, whether it could be written or not."""
        if active and self.path.is_file():
            self.kept = [line for text in _whole_lines(self.path) if (line := json.loads(text))["step"] <= first_step]
            part = self.path.with_name(METRICS + ".part")
            part.write_text("".join(json.dumps(line) + "\n" for line in self.kept))
            part.replace(self.path)

    def write(self, **values: Any) -> None:
        if not self.active:
            return
        known = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
        for listener in self.listeners:
            listener(known)
        line = (json.dumps(known) + "\n").encode()  # JSON knows no NaN
        try:
            with self.path.open("ab", buffering=0) as file:
                before = file.seek(0, os.SEEK_END)
                if file.write(line) < len(line):  # the disk became full within the line
                    file.truncate(before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self.warned:
                self.warned = True
                log.warning("%s cannot be written: %s; training goes on", self.path, error)


def _whole_lines(path: Path) -> list[str]:
    """All but a last line that a killed process left half written."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]
