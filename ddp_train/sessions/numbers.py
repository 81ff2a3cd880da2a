"""Numbers that a session logs, in lines of metrics.jsonl at each logging interval."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_train.distributed.process_group import from_all_ranks
from ddp_train.distributed.world import World
from ddp_train.errors import LogError
from ddp_train.options.sections import TrackerConfig
from ddp_train.sessions.settings import UsageError
from ddp_train.tasks.logged_numbers import LogCall, LoggedNumbers, Moment, Rule
from ddp_train.tasks.mean_loss import Number, as_tensor
from ddp_train.telemetry.metrics_log import MetricsFile
from ddp_train.telemetry.own_numbers import OF_THE_LINE
from ddp_train.telemetry.trackers.delivery import FILE as DELIVERED
from ddp_train.telemetry.trackers.media import Media
from ddp_train.telemetry.trackers.scalars import plain_values
from ddp_train.telemetry.trackers.tracker import TrackedRun
from ddp_train.telemetry.trackers.tracking import Tracking

LOG = "run.log"
OF_A_SESSION = (*OF_THE_LINE, "samples_seen", "figures", "lrs", "mfu")
"""Fields of its lines that are not the user's: its loss and its learning rate are."""
TRAIN = "train"
SCORED = ("validation", "test")
"""First parts of names, before the slash, whose numbers are of an evaluation: a line of this
kind."""


@dataclass(frozen=True)
class Place:
    """The place of a line of training."""

    step: int
    epoch: int
    """The number of the epoch, from 1."""
    time: float
    seconds: float
    """Seconds of training since the line before."""


@dataclass(frozen=True)
class Sent:
    """Numbers of all processes that are on their way to the host."""

    of_ranks: Tensor
    """[ranks, n], complete when `arrived` is."""
    arrived: torch.cuda.Event | None
    """None on the CPU."""
    place: Place
    has_line: bool
    """A line of training is written."""


@dataclass(frozen=True)
class NumbersNow:
    """The numbers of a session that are in no line yet."""

    of_all: dict[str, Any]
    """Those that all processes know, see `SessionNumbers.state`."""
    logged: list[Any]
    """Those of this process alone, see `LoggedNumbers.kept`."""
    samples: int
    """Samples of this process that are in no exchange yet."""


def log_call(name: str, values: Any, over: Any, how: str, in_step: bool) -> LogCall:
    """The arguments of `Run.log`, checked.

    in_step: of a batch of training, of which processes have different numbers of samples.

    Raises UsageError if they do not fit together.
    """
    alone = None if in_step else Rule.LAST
    try:
        return LogCall.of(LOG, name, values, over, how, alone)
    except LogError as error:
        raise UsageError(str(error), error.remedy) from None


class SessionNumbers:
    """The numbers that a session logs, on one process.

    All processes call `line`, `flush` and `catch_up` at the same steps: these exchange something.
    On a GPU the host does not wait in `line`: it reads the numbers at the next one.
    """

    def __init__(self, run_dir: Path, world: World, device: str, every_steps: int) -> None:
        self.run_dir = run_dir
        self.world = world
        self.device = device
        self.every_steps = every_steps
        self.logged = LoggedNumbers(device, OF_A_SESSION)
        self.metrics: MetricsFile | None = None
        """None before the first line: it is known then where the run resumes."""
        self.samples = 0
        """Samples of this process since the last exchange."""
        self.samples_seen = 0
        """Samples of all processes since the start of the run."""
        self.samples_of_line = 0
        """Samples since the last line of training, of the processes that are here now: their clock
        knows nothing of earlier ones."""
        self.first_step = 0
        """The step that the run began at here."""
        self.last_line = 0
        """The step of the last line of training."""
        self.tracking: Tracking | None = None
        self.media = Media(is_held=device.startswith("cuda"))
        self.hyperparameters: dict[str, Any] = {}
        self.sent: Sent | None = None
        self.began = self.step_ended = time.perf_counter()

    def resume(self, step: int, state: dict[str, Any]) -> None:
        """Continue where a checkpoint was saved. state: see `state`."""
        self.first_step = self.last_line = step
        self.samples_seen = state.get("samples_seen", 0)
        self.logged.load_state(state.get("logged", ()))
        self.began = time.perf_counter()  # set-up does not count in the first line

    def state(self) -> dict[str, Any]:
        """The numbers that are in no line yet, for a checkpoint; to be called after `catch_up`."""
        return {
            "samples_seen": self.samples_seen,
            "logged": self.logged.state(),
        }

    def not_in_lines(self) -> NumbersNow:
        """The numbers that are in no line yet, for memory that outlives this process."""
        self._finish()
        return NumbersNow(self.state(), self.logged.kept(), self.samples)

    def open(self) -> None:
        """Open the file, and the trackers, when it is known where the run begins."""
        if self.metrics is not None:
            return
        self.metrics = MetricsFile(self.run_dir, self.world.is_leader, self.first_step)
        if not self.tracking or not self.tracking.trackers:
            return
        if not self.first_step:  # begun anew: its lines are sent anew
            (self.run_dir / DELIVERED).unlink(missing_ok=True)
        run = TrackedRun(
            self.run_dir,
            self.run_dir.name,
            TrackerConfig().project,
            plain_values(self.hyperparameters),
            self.first_step,
        )
        self.tracking.start(run, self.metrics.kept)
        self.metrics.listeners.append(self.tracking.write)

    # --- one process ------------------------------------------------------------------------------

    def log(self, step: int, call: LogCall) -> None:
        """Take a number. step: updates that are done.

        Raises UsageError for a name that lines have already, or that went by another rule.
        """
        try:
            self.logged.check(LOG, call.name, call.rule)
            entry = call.entry()
        except LogError as error:
            raise UsageError(str(error), error.remedy) from None
        if entry is None:
            return
        kind, _, rest = call.name.partition("/")
        if kind in SCORED and rest:
            self.logged.add_at(Moment(kind, step), entry.renamed(rest))
        else:
            self.logged.add(step, entry)

    def end_step(self, step: int, samples: int) -> None:
        """Take what the model logged in a step.

        samples: of this process.
        """
        self.samples += samples
        self.step_ended = time.perf_counter()
        if self.logged.pending:
            self.logged.count_pass(step, counts=samples > 0)

    # --- all processes ----------------------------------------------------------------------------

    def line(self, step: int, epoch: int) -> None:
        """Write a line of training, now or, on a GPU, at the next call."""
        self._finish()
        now = time.perf_counter()
        seconds = self.step_ended - self.began
        self._send(Place(step, epoch, time.time(), seconds), has_line=True)
        self.began = now
        if self.sent and self.sent.arrived is None:
            self._finish()

    def flush(self, step: int, epoch: int) -> None:
        """Write all that was logged."""
        self.line(step, epoch)
        self._finish()

    def catch_up(self, step: int, epoch: int) -> None:
        """Take what all processes have logged, before a checkpoint."""
        self._finish()
        self._send(Place(step, epoch, time.time(), 0.0), has_line=False)
        self._finish()

    def _send(self, place: Place, has_line: bool) -> None:
        numbers: list[Number] = [*self.logged.collect(), float(self.samples)]
        self.samples = 0
        of_ranks = from_all_ranks(as_tensor(numbers, self.device))
        arrived = None
        if of_ranks.is_cuda:
            pinned = torch.empty(of_ranks.shape, dtype=of_ranks.dtype, pin_memory=True)
            of_ranks = pinned.copy_(of_ranks, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self.sent = Sent(of_ranks, arrived, place, has_line)

    def _finish(self) -> None:
        """Read what was sent last, and write its lines."""
        sent = self.sent
        if sent is None:
            return
        self.sent = None
        if sent.arrived is not None:
            sent.arrived.synchronize()
        rows = sent.of_ranks.tolist()
        try:
            self.logged.deliver([row[:-1] for row in rows])
        except LogError as error:
            raise UsageError(str(error), error.remedy) from None
        samples = int(sum(row[-1] for row in rows))
        self.samples_seen += samples
        self.samples_of_line += samples
        self._write(sent.place, sent.has_line)
        self.media.release()

    def _write(self, place: Place, has_line: bool) -> None:
        self.open()
        moments = self.logged.take_moments()
        for moment, numbers in moments:
            if moment.step < place.step:
                self._write_score(moment, numbers, place)
        if has_line and (place.step > self.last_line or self.logged.has_some):
            self._write_training(place)
        for moment, numbers in moments:
            if moment.step >= place.step:
                self._write_score(moment, numbers, place)

    def _write_training(self, place: Place) -> None:
        assert self.metrics
        numbers = self.logged.take()
        if place.seconds > 0:
            numbers["samples_per_second"] = self.samples_of_line / place.seconds
        self.metrics.write(
            kind=TRAIN,
            step=place.step,
            epoch=place.epoch,
            time=place.time,
            **numbers,
            samples_seen=self.samples_seen,
        )
        self.last_line = place.step
        self.samples_of_line = 0

    def _write_score(self, moment: Moment, numbers: dict[str, float], place: Place) -> None:
        assert self.metrics
        self.metrics.write(
            kind=moment.kind, step=moment.step, epoch=place.epoch, time=place.time, **numbers
        )
