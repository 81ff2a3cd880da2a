"""One process of a session, from the beginning of the `with` to its end."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import random
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import torch

from ddp_train.distributed.environment import launcher_pid, threads_asked
from ddp_train.distributed.preflight import meet
from ddp_train.distributed.process_group import Store, open_store
from ddp_train.distributed.world import World
from ddp_train.errors import PeerError
from ddp_train.recovery.kept_checkpoint import save_step_of_last_attempt
from ddp_train.resilience import failure_report, heartbeat, stacks
from ddp_train.resilience.failure import NO_SAMPLE
from ddp_train.resilience.preemption import (
    INTERRUPTED,
    SAVED,
    StopController,
    exit_code,
    stop_signals,
)
from ddp_train.resilience.stdio import tolerate_closed_streams
from ddp_train.resilience.whole_files import write_json
from ddp_train.runs.failure_reporter import FailureReporter
from ddp_train.runs.worker_process import (
    JOIN_SECONDS,
    WorkerProcess,
    die_with_parent,
    leave_without_peers,
    opening_logs,
    prepare_gpu,
)
from ddp_train.sessions.run import Run
from ddp_train.sessions.settings import Settings, in_words, is_interactive
from ddp_train.sessions.steps import Steps, StoppedError
from ddp_train.telemetry.log_files import log_handlers, redirect_streams
from ddp_train.telemetry.pages.live import LivePage
from ddp_train.telemetry.trackers.tracking import FAILED_SECONDS, Tracking, open_trackers
from ddp_train.text import counted

NOTHING_IS_KEPT = (
    "note: ddp_train.session: after a failure the run goes back to its last checkpoint. It"
    " cannot keep later steps in memory under torchrun, or where `ulimit -f` limits the size of"
    " files"
)


@contextlib.contextmanager
def joined(settings: Settings, world: World, alone: bool) -> Iterator[Run]:
    """Inside, this process is one of the run.

    alone: it is the only one, and nobody else started it: it ends by SystemExit. The others end at
        once, since a process group may be broken.
    """
    if not alone:
        tolerate_closed_streams()
        die_with_parent()
    process = SessionProcess(settings, world, alone)
    process.meet()
    # In a notebook this process lives on: nothing of the session may stay, after a failure either.
    with contextlib.ExitStack() as leftovers:
        try:
            steps = process.prepare(leftovers)
            with process.training(steps) as run:
                yield run
            process.write_summary(steps)
        except BaseException as error:
            if alone and is_interactive():
                raise
            process.end_by_failure(error)
    process.end()


class SessionProcess:
    """This process of a session."""

    def __init__(self, settings: Settings, world: World, alone: bool) -> None:
        """alone: see `joined`."""
        self.settings = settings
        self.world = world
        self.alone = alone
        self.facts = settings.facts(world.size)
        self.worker = WorkerProcess(settings.run_dir, world)
        self.reporter = FailureReporter(self.worker, self.facts, in_words)
        self.stop = StopController()
        self.store: Store | None = None
        """The key-value store that all processes share, once this one has joined them."""
        self.is_stopped = False
        self.tracking: Tracking | None = None
        self.steps: Steps | None = None
        """None until they are prepared."""

    def meet(self) -> None:
        """Wait until all processes are here, where no launcher of ours has started them.

        Rank 0 holds the run directory by then. Before, nothing is written there: it may be that of
        a run that lives.
        """
        if self.world.size == 1 or self.worker.board is not None:
            return
        seconds = self.settings.timeout_seconds
        try:
            self.store = open_store(self.world, seconds)
            meet(self.store, self.world, seconds)
        except PeerError as error:
            leave_without_peers(self.world, error)

    def prepare(self, leftovers: contextlib.ExitStack) -> Steps:
        """Open the logs, set up device and seeds.

        leftovers: undoes it.
        """
        settings = self.settings
        worker = self.worker
        launched_by_us = worker.board is not None
        if self.world.is_leader and not launched_by_us:
            failure_report.set_aside(settings.run_dir)
        self._open_logs(leftovers)
        if not self.alone:
            worker.status.keep_beating()
        device = self.world.device(settings.device)
        threads = threads_asked()
        if launched_by_us and threads:
            torch.set_num_threads(threads)  # a forked process has imported torch with one
        if device.startswith("cuda"):
            prepare_gpu(False, settings.run_dir, self.world.rank, device)
        note = seed_in_vain(torch.initial_seed(), settings.seed)
        if note and self.world.is_leader:
            print(note, file=sys.stderr)
        torch.manual_seed(settings.seed)
        np.random.seed(settings.seed & 0xFFFFFFFF)
        random.seed(settings.seed)
        self.steps = steps = Steps(settings, self.world, device, worker.status, self.stop)
        if worker.board is not None:
            steps.exchange_watch.watch(worker.board.ranks)
        trackers = settings.trackers if self.world.is_leader else {}
        self.tracking = leftovers.enter_context(
            open_trackers(trackers, settings.grace_seconds, settings.timeout_seconds)
        )
        steps.numbers.tracking = self.tracking
        if self.world.is_leader:
            steps.media.tracking = self.tracking
        steps.numbers.hyperparameters = {**self.facts, **settings.hyperparameters}
        leftovers.callback(self.stop.close)
        leftovers.callback(steps.close)
        return steps

    def _open_logs(self, leftovers: contextlib.ExitStack) -> None:
        """Send what this package and Python's warnings say to the log.

        It goes there beside whatever logging the user has set up. What other processes than rank 0
        print goes there too.
        """
        log_file = self.worker.log_file
        with opening_logs(log_file):
            handlers = log_handlers(log_file, self.world.rank, self.world.is_leader)
            if not self.alone:
                stacks.show_stacks(self.settings.run_dir, self.world.rank)
        root = logging.getLogger()
        for handler in handlers:
            root.addHandler(handler)
            leftovers.callback(handler.close)
            leftovers.callback(root.removeHandler, handler)
        logging.getLogger("ddp_train").setLevel(logging.INFO)
        logging.captureWarnings(True)
        if not self.world.is_leader:
            redirect_streams(log_file)

    @contextlib.contextmanager
    def training(self, steps: Steps) -> Iterator[Run]:
        """Inside, the process group is open and stop requests are heard. A stop ends the body."""
        settings = self.settings
        worker = self.worker
        if self.world.size > 1 and self.store is None:
            self.store = open_store(self.world, JOIN_SECONDS)
        store = self.store
        worker.status.phase = "build"
        backend = str(self.facts["backend"])
        with worker.group(store, steps.device, backend, settings.timeout_seconds):
            memory = worker.kept_memory
            is_leader = self.world.is_leader
            save_step_of_last_attempt(memory, settings.run_dir, is_leader, steps.device)
            if not settings.is_proof:
                steps.kept_memory = memory
            if memory is None and is_leader and not self.alone:
                print(NOTHING_IS_KEPT, file=sys.stderr)
            connection = store.clone() if store else None
            patience_seconds = settings.grace_seconds / 2
            with (
                _same_handlers_after(),
                self.stop.listening(
                    worker.status, self.world, connection, patience_seconds, worker.leave
                ),
            ):
                try:
                    with steps.numbers.logged.open():
                        yield Run(steps)
                    steps.end()
                except StoppedError:
                    self.is_stopped = True
                if steps.saving:
                    steps.saving.checkpoints.finish()
            steps.close()
            self.stop.close()

    def write_summary(self, steps: Steps) -> None:
        """Write summary.json, and say where a stopped run resumes, on rank 0."""
        if not self.world.is_leader:
            return
        if steps.update_record:
            steps.update_record.write()
        position = steps.loop.position
        summary = {
            "status": "preempted" if self.is_stopped else "completed",
            **self.facts,
            "steps": position.step,
            "epochs": position.epoch,
        }
        write_json(self.settings.run_dir / failure_report.SUMMARY, summary)
        if self.tracking:
            self.tracking.finish(summary)
        if launcher_pid() is None:
            LivePage(self.settings.run_dir, {}).write()
        if not self.is_stopped:
            return
        place = f"epoch {position.epoch}"
        if position.batch:
            place += f", {counted(position.batch, 'step')} of it"
        saved = " and saved; the same command resumes the run"
        if position.batch and steps.whole_epochs and steps.saving:
            epoch = steps.saving.saved_epoch
            saved = f"; the same command resumes at the beginning of epoch {epoch}"
        print(f"stopped after step {position.step} ({place}){saved}", file=sys.stderr)

    def end_by_failure(self, error: BaseException) -> NoReturn:
        """Report a failure, and end this process with its exit code."""
        if self.steps and not self.steps.has_samples:
            error.add_note(NO_SAMPLE)
        code = self.reporter.log_and_report(error, self.settings.grace_seconds)
        if self.tracking:
            self.tracking.close("failed", {}, FAILED_SECONDS)
        if not self.alone:
            self.worker.leave(code)
        for child in multiprocessing.active_children():
            # The interpreter would wait for a loader process, which ignores SIGTERM.
            if child.daemon:
                child.kill()
        raise SystemExit(code) from None

    def end(self) -> None:
        """End this process if the run was stopped; else it continues behind the session."""
        status = self.worker.status
        status.phase = heartbeat.END
        status.is_done = 1
        if not self.is_stopped:
            status.leaving(0)
        elif not self.alone:
            self.worker.leave(SAVED)
        elif exit_code(self.stop.signal_number) == INTERRUPTED:
            raise SystemExit(INTERRUPTED)
        else:
            raise SystemExit(SAVED)


def seed_in_vain(earlier: int, seed: int) -> str | None:
    """A note on a `torch.manual_seed` before the session, which seeds anew; None if there was none.

    earlier: the seed that torch has had until now. It has drawn one of 64 bits unless it was given
        one, and those that people give are small.
    seed: of the session.
    """
    if earlier == seed or earlier >= 2**32:
        return None
    return (
        f"note: ddp_train.session seeds torch, numpy and random by seed={seed}, so"
        f" torch.manual_seed({earlier}) before the session has no effect; use"
        f" ddp_train.session(..., seed={earlier}), or move the call into the `with`"
    )


@contextlib.contextmanager
def _same_handlers_after() -> Iterator[None]:
    """Restore the handlers of stop signals: Ctrl-C must end a script that continues."""
    before = {number: signal.getsignal(number) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
