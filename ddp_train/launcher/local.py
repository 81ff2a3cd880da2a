"""A run on this host: its attempts, one after the other, until one completes or a failure is final.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ddp_train.checkpoints.layout import newest_step
from ddp_train.errors import NonFiniteLossError
from ddp_train.launcher import loopback
from ddp_train.launcher.attempt import Attempt, AttemptEnd, Launch
from ddp_train.launcher.decide import (
    NOT_SAVED,
    End,
    FailedAttempt,
    History,
    Restart,
    decide,
    sentences,
)
from ddp_train.launcher.elastic import Elastic
from ddp_train.launcher.fork_server import ForkServer
from ddp_train.launcher.kept_attempt import KeptAttempt, save_in_own_process
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.launcher.workload import Workload
from ddp_train.linux import adopting_orphans
from ddp_train.options.schema import Config
from ddp_train.resilience import failure_report
from ddp_train.resilience.failure import Failure
from ddp_train.resilience.held_devices import HeldDevices
from ddp_train.resilience.kept_memory import KeptMemory
from ddp_train.resilience.lost_ranks import Loss
from ddp_train.resilience.preemption import SAVED, UNSAVED
from ddp_train.text import counted


def launch(
    config: Config,
    import_path: Path | None,
    stop: StopRequests | None = None,
    server: ForkServer | None = None,
    at_another_number: Callable[[int], Config] | None = None,
    workload: Workload = Workload(),  # noqa: B008  it is frozen
) -> int:
    """Run a frozen config in new processes, and again after a failure if restarts are left.

    Returns the exit code.

    import_path: the folder of a checkout, from which workers import first.
    stop: records the stop requests for the caller, even if the run was completed all the same.
    server: forks the workers, if it can and `launch.fork_server` is true; otherwise each worker is
        started as a new interpreter.
    at_another_number: makes the config for another number of processes, where it has a range.
    workload: what runs in the processes.
    """
    stop = stop or StopRequests()
    elastic = Elastic(config, at_another_number)
    memory = None
    if config.mode == "train":
        memory = KeptMemory.create(max([elastic.size.count, *elastic.size.counts]))
    devices = None
    if memory and config.device == "cuda":
        devices = HeldDevices()
    run = LocalRun(Launch(import_path, stop, server, elastic, workload, memory, devices))
    code = UNSAVED
    try:
        with stop.listening(), adopting_orphans():
            code = loopback.report_if_down(config, workload) or run.execute()
    finally:
        if memory:
            memory.close()
        if devices:
            devices.close()
        elastic.close(completed=code == 0)
        workload.page.write()
    return code


class LocalRun:
    """Makes attempts until one completes, is stopped, or fails for good."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.elastic = launch.elastic
        self.stop = launch.stop
        self.max_restarts = launch.elastic.config.launch.max_restarts
        self.run_dir = Path(str(launch.elastic.config.run_dir))
        self.history = History(newest_step=newest_step(self.run_dir))

    def execute(self) -> int:
        """Make attempts until the run ends. Returns its exit code."""
        loss: Loss | None = None
        kept: KeptAttempt | None = None
        for number in itertools.count():
            ended = self._attempt(number, loss, kept)
            kept = ended.kept
            if ended.code == 0:
                return 0
            if ended.code == SAVED and ended.is_for_change and not self.stop.received:
                self._resize()
                loss = None  # it is in the checkpoint
                continue
            if ended.code in (SAVED, UNSAVED):
                is_kept_saved = kept is not None and self._save_kept(kept)
                return self._end_stopped(ended, is_kept_saved)
            failed = self._failed_attempt(ended)
            loss = self._loss(failed, ended.loss, loss)
            size = self.elastic.size
            decision = self._decide(failed, ended)
            if ended.report:
                is_fatal = isinstance(decision, End) or kept is None
                ended.report.print(is_fatal=is_fatal)
            # Other processes may see other GPUs than those that hold the memory.
            goes_on_as_it_is = isinstance(decision, Restart) and self.elastic.size == size
            if kept and not goes_on_as_it_is and not self._save_kept(kept):
                kept = None
            self._say(decision, kept, loss, failed)
            if isinstance(decision, End):
                return decision.code
            if not goes_on_as_it_is:
                kept = None  # it is in a checkpoint
            if self.elastic.is_requested:
                self._resize()
        raise AssertionError("unreachable: the loop has no end")

    def _attempt(self, number: int, loss: Loss | None, kept: KeptAttempt | None) -> AttemptEnd:
        attempt = Attempt(self.launch, number, loss, kept)
        with contextlib.closing(attempt):
            ended = attempt.run()
        if ended.code not in (0, SAVED):
            ended = dataclasses.replace(ended, kept=self._kept(ended, kept))
        self.launch.workload.page.attempt_ended(saved=ended.code == SAVED)
        return ended

    def _kept(self, ended: AttemptEnd, before: KeptAttempt | None) -> KeptAttempt | None:
        """The step that an attempt leaves to the next; None if a checkpoint has it, or must not.

        before: what the attempt was started with. It may have ended before it had saved that.
        """
        memory = self.launch.memory
        failure = self._failure()
        if memory is None:
            return None
        if failure and failure.kind in NOT_SAVED:
            memory.forget()  # a later attempt that fails before its first step must not find it
            return None
        gpus = self.elastic.size.gpus_in_use()
        kept = KeptAttempt.of(memory, self.launch.devices, self.run_dir, ended.is_saving, gpus)
        if kept and before and kept.step == before.step:
            return dataclasses.replace(kept, is_saving=before.is_saving)
        return kept

    def _save_kept(self, kept: KeptAttempt) -> bool:
        """Save what an attempt has kept, where no other follows. Returns whether it is saved."""
        launch = self.launch
        section = self.elastic.config.launch
        is_stopped = bool(launch.stop.received)
        return save_in_own_process(
            kept,
            self.run_dir,
            launch.import_path,
            launch.server if section.fork_server else None,
            section.grace_seconds if is_stopped else section.timeout_seconds,
            given_up=lambda: launch.stop.repeated,
        )

    def _end_stopped(self, ended: AttemptEnd, is_kept_saved: bool) -> int:
        """Say that the run was stopped. is_kept_saved: what the workers had kept is saved."""
        workers_saved = ended.code == SAVED
        if not workers_saved or ended.is_for_change:  # no worker has said it
            config = self.elastic.config
            saved = workers_saved or is_kept_saved
            self.stop.print_stopped(config, saved, self.launch.workload.translate)
        return self.stop.exit_code(SAVED if is_kept_saved else ended.code)

    def _loss(self, failed: FailedAttempt, loss: Loss | None, before: Loss | None) -> Loss | None:
        """The loss for the next attempt.

        loss: of this attempt. before: the one that this attempt was started after.
        """
        if loss is None:
            return None
        failure = failed.failure
        if failure is not None:
            rank = loss.rank if failure.rank is None else failure.rank
            loss = dataclasses.replace(loss, kind=failure.kind, rank=rank)
        has_left_a_state = (
            failed.kept_step is not None or failed.newest_checkpoint > self.history.newest_step
        )
        if has_left_a_state or (before and loss.at == before.at):
            return loss
        return loss.after(before)

    def _decide(self, failed: FailedAttempt, ended: AttemptEnd) -> Restart | End:
        """Decide what follows a failure, and take over the size and the history that go with it.

        A stop that is requested later does not enter it: the next attempt sees that.
        """
        size = self.elastic.size
        decision = decide(failed, self.history, size, self.max_restarts)
        if isinstance(decision, Restart) and decision.otherwise:
            lost_at = ended.loss.at if ended.loss else time.monotonic()
            if not self.elastic.become_smaller(decision.size, decision.reason, lost_at):
                decision = decision.otherwise
        if isinstance(decision, Restart):
            self.history = self.history.after(failed, size, decision)
        return decision

    def _failure(self) -> Failure | None:
        """The failure that the last attempt has reported."""
        try:
            return failure_report.recorded_failure(self.run_dir)
        except (OSError, ValueError, TypeError):  # it could not be written, or was damaged since
            return None

    def _failed_attempt(self, ended: AttemptEnd) -> FailedAttempt:
        failure = self._failure()
        return FailedAttempt(
            code=ended.code,
            failure=failure,
            by_signal=failure is not None and failure.rank in ended.killed_ranks,
            unreachable_gpus=self.elastic.unreachable_gpus(),
            newest_checkpoint=newest_step(self.run_dir),
            kept_step=ended.kept.step if ended.kept else None,
            stop_requested=bool(self.stop.received),
        )

    def _say(
        self,
        decision: Restart | End,
        kept: KeptAttempt | None,
        loss: Loss | None,
        failed: FailedAttempt,
    ) -> None:
        """Print what follows a failure. kept: what goes on, or is saved."""
        kept_step = kept.step if kept else None
        redone = loss.step - kept.step if kept and loss else 0
        to_resume = self.elastic.config.words_to_resume
        finite_step = None
        if failed.failure and failed.failure.kind == NonFiniteLossError.kind:
            finite_step = failed.newest_checkpoint
        for sentence in sentences(
            decision, kept_step, self.max_restarts, to_resume, redone, finite_step
        ):
            print(self.launch.workload.translate(sentence), file=sys.stderr)

    def _resize(self) -> None:
        """Take the number of processes that was asked for."""
        step = max(0, newest_step(self.run_dir))
        if self.elastic.become_requested(step):
            self.history = self.history.after_resize()
            processes = counted(self.elastic.size.count, "process")
            print(f"continuing with {processes}, from step {step}: as requested", file=sys.stderr)
