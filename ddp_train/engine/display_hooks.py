"""Hooks for people to look at: weights and images in TensorBoard, a text that a language model
writes."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor, nn

from ddp_train.data.batch import Batch
from ddp_train.engine.loop import Hook, Job
from ddp_train.telemetry.console import Display
from ddp_train.telemetry.trackers.delivery import TrackerThread
from ddp_train.telemetry.trackers.tensorboard import TensorBoard

WAITING_HISTOGRAMS = 4
"""Copies of all weights that may wait to be written; later epochs are skipped until one is."""
IMAGES = 32
"""Images of the first batch that TensorBoard shows."""
SAMPLE = "sample.txt"
log = logging.getLogger(__name__)


class WeightHistograms:
    """Histograms of the weights for TensorBoard, at the end of each epoch. On one process: nothing
    is exchanged."""

    def __init__(self, thread: TrackerThread, board: TensorBoard) -> None:
        self.thread = thread
        self.board = board
        self.slots = threading.Semaphore(WAITING_HISTOGRAMS)

    def due(self, job: Job) -> int:
        return job.plan.epoch_end(job.step)

    def act(self, job: Job) -> None:
        if job.plan.ends_epoch(job.step) and self.slots.acquire(blocking=False):
            weights = {
                name: p.detach().to("cpu", copy=True)
                for name, p in job.module.model.named_parameters()
            }
            self.thread.call_later(functools.partial(self._show, job.step, weights))

    def _show(self, step: int, weights: dict[str, Tensor]) -> None:
        try:
            if self.thread.is_open:
                self.board.show_weights(step, weights)
        finally:
            self.slots.release()


class SampleHook:
    """A text that the model writes when training is complete: shown, and kept in
    run_dir/sample.txt. On one process: nothing is exchanged."""

    def __init__(self, write: Callable[[nn.Module], str], display: Display, path: Path) -> None:
        """write: returns a text by the model in eval mode."""
        self.write = write
        self.display = display
        self.path = path

    def due(self, job: Job) -> int:
        return job.plan.steps

    def act(self, job: Job) -> None:
        if job.step < job.plan.steps:
            return
        text = self.write(job.module.model)
        self.display.line(f"the model writes ({self.path.name}):\n{text}\n")
        try:
            self.path.write_text(text)
        except OSError as error:  # a full disk must not fail a run that is complete
            log.warning("%s cannot be written: %s", self.path, error)


def tensorboard_details(
    threads: Sequence[TrackerThread], model: nn.Module, first_batch: Callable[[], Batch]
) -> list[Hook]:
    """The hook that TensorBoard's details need. Shows it the model now, before training begins.

    first_batch: as training sees it; it is asked for only if TensorBoard is among the trackers.
    """
    for thread in threads:
        board = thread.tracker
        if isinstance(board, TensorBoard):
            inputs = first_batch().data
            if isinstance(inputs, tuple | list):
                inputs = inputs[0]
            if isinstance(inputs, Tensor):
                thread.show(functools.partial(board.show_model, model, inputs[:IMAGES]))
                thread.wait_until_idle()  # the model is traced: nobody else may use it
            return [WeightHistograms(thread, board)]
    return []
