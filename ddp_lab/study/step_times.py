"""Times the parts of each training step: wraps the batches of a job and observes its stepper.

    asked          got                              ready              exchanged       stepped
                   asked
      |-- data wait --|-- forward, backward (compute) --|-- exposed exchange --|-- optimizer --|--
      host ------|

`ready`: the last gradient of this process is complete (a hook on each parameter, which torch calls
before DDP's own); `exchanged`: the backward pass has returned, which with DDP is when all buckets
are exchanged. Between them a process waits for the exchange and for slower processes: the shortest
wait of all ranks is the exchange, the rest is waiting. On GPUs the marks are CUDA events in the
training stream: no step waits for them, and time in which the GPU is idle (late launches) counts
for the part in which it occurs.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_lab.study.step_breakdown import PARTS
from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.distributed.world import World
from ddp_train.engine.hook_context import HookContext
from ddp_train.optim.stepper import StepObserver

FOLDER = "probe"
Mark = Any
"""A point in time: seconds on the CPU, an event on a GPU."""


class StepTimes(StepObserver):
    """Inside, times every step of a job; at the end writes their seconds to
    RUN_DIR/probe/step_times_rank_#.json."""

    def __init__(self, job: HookContext, run_dir: Path, world: World) -> None:
        self.job = job
        self.path = run_dir / FOLDER / f"step_times_rank_{world.rank}.json"
        self.on_gpu = next(job.module.parameters()).is_cuda
        self.steps: list[list[tuple[str, Mark]]] = [[]]
        """The marks of each step: the name of the part that ends there, and the time."""
        self.ready: Mark = None
        self.steps_behind = 0
        """Number of steps at whose end the GPU had finished all launched work: it waits for the
        host."""
        self.gradients = 0
        """Number of gradients in the current backward pass."""
        self.gradients_before = 0
        """Number of gradients in the previous backward pass."""

    def __enter__(self) -> StepTimes:
        job = self.job
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self._after_gradient)
            for parameter in job.module.parameters()
            if parameter.requires_grad
        ]
        job.batches = _TimedBatches(job.batches, self)
        job.observe(self)
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        self.job.stop_observing(self)
        if failed:
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        pairs = itertools.pairwise(self.steps)  # the host part of the last step has no end
        content = {
            "steps": [
                self._seconds(marks, following[0][1])
                for marks, following in pairs
                if marks and following
            ],
            "gpu_waits_for_host": self.steps_behind / len(self.steps) if self.on_gpu else None,
        }
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(content) + "\n")

    def mark(self, part: str) -> None:
        """End a part now."""
        self.steps[-1].append((part, self._now()))

    def after_backward(self, micro_batch: MicroBatch) -> None:
        if self.ready is not None:  # None if no parameter has a gradient
            self.steps[-1].append(("compute", self.ready))
        self.mark("exposed")
        self.ready = None
        self.gradients_before = self.gradients
        self.gradients = 0

    def after_update(self, steps_done: int) -> None:
        """`exchanged` was recorded before the optimizer's launches: if the GPU is already past it,
        it is idle."""
        if self.on_gpu:
            self.steps_behind += self.steps[-1][-1][1].query()
        self.mark("compute")
        self.steps.append([])

    def _after_gradient(self, _: Tensor) -> None:
        self.gradients += 1
        # only the last gradient is recorded: an event costs some microseconds
        if self.gradients >= self.gradients_before:
            self.ready = self._now()

    def _now(self) -> Mark:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, marks: list[tuple[str, Mark]], end: Mark) -> dict[str, float]:
        """The seconds of each part. The first mark starts the step; the host part lasts until the
        next step."""
        seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in itertools.pairwise([*marks, ("host", end)]):
            if self.on_gpu:
                seconds[part] += before.elapsed_time(after) / 1e3
            else:
                seconds[part] += after - before
        return seconds


class _TimedBatches:
    """The batches of a job; the data part begins when the loop asks for a batch."""

    def __init__(self, batches: Iterable[Batch], times: StepTimes) -> None:
        self.batches = batches
        self.times = times

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.batches)
        while True:
            self.times.mark("host")
            batch = next(batches, None)
            if batch is None:
                return
            self.times.mark("data")
            yield batch
