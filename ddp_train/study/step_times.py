"""Where the time of a step goes, measured in the run itself: the loop's collaborators are wrapped, it knows nothing.

    asked          got                              ready              exchanged       stepped           asked
      |-- data wait --|-- forward, backward (compute) --|-- exposed exchange --|-- optimizer --|-- host ------|

`ready`: the last gradient of this process is there (a hook on each parameter, which torch calls before DDP's own);
`exchanged`: the backward pass has returned, for which DDP waits until all buckets are. Between them a process waits
for the exchange, and for processes that are slower: the least wait of all ranks is the exchange, the rest is waiting.
On GPUs the same marks are CUDA events in the stream of training: no step waits for them, and a part in which the GPU
runs dry (launches that come too late) counts where it happens.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.loader import Batch
from ddp_train.distributed.world import World
from ddp_train.optim.stepper import Stepper
from ddp_train.training.loop import Job

FOLDER = "probe"
PARTS = ("data", "compute", "exposed", "host")
Mark = Any
"""A moment: seconds on the CPU, an event on a GPU."""


class StepTimes:
    """Inside, every step of a job is timed; at the end RUN_DIR/probe/step_times_rank_#.json has the seconds of each."""

    def __init__(self, job: Job, run_dir: Path, world: World) -> None:
        self.job, self.path = job, run_dir / FOLDER / f"step_times_rank_{world.rank}.json"
        self.on_gpu = next(job.module.parameters()).is_cuda
        self.steps: list[list[tuple[str, Mark]]] = [[]]
        """For each step its marks: the name of what ends there, and the moment."""
        self.ready: Mark = None
        self.behind = 0
        """Steps at whose end the GPU had done all that was asked of it: it waits for the host."""
        self.gradients = self.gradients_before = 0
        """That came in the backward pass that is going on, and in the one before."""

    def __enter__(self) -> StepTimes:
        job = self.job
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self._note)
            for parameter in job.module.parameters()
            if parameter.requires_grad
        ]
        job.batches = _TimedBatches(job.batches, self)
        job.stepper = cast(Stepper, _TimedStepper(job.stepper, self))
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        if failed:
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        pairs = itertools.pairwise(self.steps)  # the last step has no next one, at which the host's part would end
        content = {
            "steps": [self._seconds(marks, after[0][1]) for marks, after in pairs if marks and after],
            "gpu_waits_for_host": self.behind / len(self.steps) if self.on_gpu else None,
        }
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(content) + "\n")

    def mark(self, part: str) -> None:
        """What went on until now was this part."""
        self.steps[-1].append((part, self._now()))

    def backward_ends(self) -> None:
        if self.ready is not None:  # none of the parameters of a model that is frozen
            self.steps[-1].append(("compute", self.ready))
        self.mark("exposed")
        self.ready, self.gradients_before, self.gradients = None, self.gradients, 0

    def step_ends(self) -> None:
        """`exchanged` lies before the optimizer's launches: a GPU that is past it already has nothing left to do."""
        if self.on_gpu:
            self.behind += self.steps[-1][-1][1].query()
        self.mark("compute")
        self.steps.append([])

    def _note(self, _: Tensor) -> None:
        self.gradients += 1
        if self.gradients >= self.gradients_before:  # only the last one counts: an event costs some microseconds
            self.ready = self._now()

    def _now(self) -> Mark:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, marks: list[tuple[str, Mark]], end: Mark) -> dict[str, float]:
        """The first mark is where the step begins. From the last one to the next step the host is at work."""
        found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in zip(marks, [*marks[1:], ("host", end)], strict=True):
            found[part] += before.elapsed_time(after) / 1e3 if self.on_gpu else after - before
        return found


class _TimedBatches:
    """The batches of a job. The wait for one begins when the loop asks for it."""

    def __init__(self, batches: Iterable[Batch], times: StepTimes) -> None:
        self.batches, self.times = batches, times

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.batches)
        while True:
            self.times.mark("host")
            batch = next(batches, None)
            if batch is None:
                return
            self.times.mark("data")
            yield batch


class _TimedStepper:
    """A Stepper. All but the two methods of the loop are its own."""

    def __init__(self, stepper: Stepper, times: StepTimes) -> None:
        self.stepper, self.times = stepper, times

    def backward(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        self.stepper.backward(loss, micro_batch)
        self.times.backward_ends()

    def step(self) -> None:
        self.stepper.step()
        self.times.step_ends()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stepper, name)
