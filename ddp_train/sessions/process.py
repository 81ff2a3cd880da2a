"""One process of a session, from the beginning of the `with` to its end: joins the others, reports,
leaves."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_train.distributed import flight_record, process_group
from ddp_train.distributed.environment import threads_asked
from ddp_train.distributed.world import World
from ddp_train.errors import WriteError
from ddp_train.performance.memory_snapshot import snapshot_file, take_when_out_of_memory
from ddp_train.resilience import (
    collectives,
    failure_report,
    heartbeat,
    peer_check,
    run_lock,
    stacks,
)
from ddp_train.resilience.heartbeat import RankStatus, status_on_board
from ddp_train.resilience.preemption import (
    INTERRUPTED,
    SAVED,
    StopController,
    exit_code,
    stop_signals,
)
from ddp_train.resilience.stdio import tolerate_closed_streams
from ddp_train.resilience.whole_files import write_bytes
from ddp_train.runs.failure_reporter import FailureReporter
from ddp_train.runs.worker import JOIN_SECONDS, WATCHED_SECONDS, die_with_parent, leave
from ddp_train.sessions.run import Run
from ddp_train.sessions.settings import Settings, in_words, is_interactive
from ddp_train.sessions.steps import Steps, StoppedError
from ddp_train.telemetry.log_files import LogFile, redirect_streams
from ddp_train.text import counted

log = logging.getLogger(__name__)


@contextlib.contextmanager
def joined(settings: Settings, world: World, alone: bool) -> Iterator[Run]:
    """Inside, this process is one of the run. alone: the only one, started by nobody else; it ends
    by SystemExit, and the others at once, since a process group may be broken."""
    if not alone:
        tolerate_closed_streams()
        die_with_parent()
    board, status = status_on_board(world)
    facts = settings.facts(world.size)
    reporter = FailureReporter(settings.run_dir, facts, world, status, board, in_words)
    store = None

    def end(code: int) -> None:
        if alone:
            raise SystemExit(code)
        leave(status.leaving(code))

    with contextlib.ExitStack() as stack:
        try:
            if board is None and world.is_leader:
                stack.callback(_locked(settings.run_dir).release)
                (settings.run_dir / failure_report.FILE).unlink(missing_ok=True)
            _open_logs(reporter.log_file, world, stack)
            if not alone:
                stacks.show_stacks(settings.run_dir, world.rank)
                status.keep_beating()
            device = world.device(settings.device)
            _prepare(settings, world, device, is_ours=board is not None)
            group = contextlib.nullcontext()
            if world.size > 1:
                store = process_group.open_store(world, JOIN_SECONDS)
                peer_check.register(store, world)
                timeout = WATCHED_SECONDS if board else settings.timeout_seconds
                backend = str(facts["backend"])
                group = process_group.session(world, device, backend, store, timeout)
            stop = StopController()
            steps = Steps(settings, world, device, status, stop)
            stack.callback(
                stop.close
            )  # after a failure too, where the process lives on: in a notebook
            stack.callback(steps.close)
            run = Run(steps)
            status.phase = "build"
            group.__enter__()
            record = collectives.record_file(settings.run_dir, world.rank)
            status.on_hang = lambda: write_bytes(record, flight_record.dump())
            is_stopped = False
            with _same_handlers_after():
                clone = store.clone() if store else None
                with stop.listening(
                    status, world, clone, settings.grace_seconds / 2, _leave_by_itself(status)
                ):
                    try:
                        yield run
                        steps.end()
                    except StoppedError:
                        is_stopped = True
                    if steps.checkpoints:
                        steps.checkpoints.finish()
            run._is_over = True
            steps.close()
            stop.close()
            group.__exit__(None, None, None)
            stacks.remove_empty_stacks(settings.run_dir, world.rank)
            _conclude(settings, world, steps, facts, is_stopped)
        except BaseException as error:
            if alone and is_interactive():
                raise
            log.error("failed in step %d, %s", status.step, status.phase, exc_info=error)
            code = reporter.report(error, store)
            status.wait_until_saved(settings.grace_seconds)
            if not alone:
                leave(status.leaving(code))
            for child in multiprocessing.active_children():
                if (
                    child.daemon
                ):  # a loader process, for which the interpreter would wait: it ignores SIGTERM
                    child.kill()
            raise SystemExit(code) from None
    status.phase = heartbeat.END
    status.is_done = 1
    if is_stopped:
        stopped_at_terminal = alone and exit_code(stop.signal_number) == INTERRUPTED
        end(INTERRUPTED if stopped_at_terminal else SAVED)
    status.leaving(0)


def _leave_by_itself(status: RankStatus) -> Callable[[int], Any]:
    """For a stop on which the ranks cannot agree. From a thread, where SystemExit would end the
    thread alone."""
    return lambda code: leave(status.leaving(code))


def _locked(run_dir: Path) -> run_lock.Lock:
    """Under torchrun, and alone: where the launcher has not done it."""
    try:
        return run_lock.acquire(run_dir / run_lock.FILE)
    except run_lock.LockHeldError as error:
        raise WriteError(
            f"another run is in {run_dir}, {error}", "wait for it, stop it, or name another run_dir"
        ) from None
    except OSError as error:
        raise WriteError(
            f"{run_dir} cannot be written: {error.strerror}", "name a folder that can"
        ) from error


def _open_logs(log_file: Path, world: World, stack: contextlib.ExitStack) -> None:
    """What this package and Python's warnings say goes to the log, beside whatever logging the user
    has set up; what other processes than rank 0 print, too."""
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handler = LogFile(log_file)
    except OSError as error:
        remedy = "free space, or give permission to write there, and start the same command again"
        raise WriteError(
            f"the logs in {log_file.parent} cannot be written: {error.strerror}", remedy
        ) from error
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s rank {world.rank} %(levelname)s %(message)s")
    )
    root = logging.getLogger()
    ours = logging.getLogger("ddp_train")
    root.addHandler(handler)
    stack.callback(handler.close)
    stack.callback(root.removeHandler, handler)
    ours.setLevel(logging.INFO)
    logging.captureWarnings(True)
    if world.is_leader:
        seen = logging.StreamHandler()
        seen.setLevel(logging.WARNING)
        seen.addFilter(
            lambda record: record.levelno == logging.WARNING
        )  # failures have their own report
        seen.setFormatter(logging.Formatter("warning: %(message)s"))
        ours.addHandler(seen)
        stack.callback(ours.removeHandler, seen)
    else:
        redirect_streams(log_file)


def _prepare(settings: Settings, world: World, device: str, is_ours: bool) -> None:
    """Threads, device and seeds. is_ours: started by our launcher, which decides the number of
    threads."""
    if is_ours and (threads := threads_asked()):
        torch.set_num_threads(threads)  # a forked process has imported torch with one
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        take_when_out_of_memory(snapshot_file(settings.run_dir, world.rank), history=False)
    torch.manual_seed(settings.seed)
    np.random.seed(settings.seed & 0xFFFFFFFF)
    random.seed(settings.seed)


@contextlib.contextmanager
def _same_handlers_after() -> Iterator[None]:
    """The script may continue after the session, and Ctrl-C must end it then."""
    before = {number: signal.getsignal(number) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _conclude(
    settings: Settings, world: World, steps: Steps, facts: dict[str, Any], is_stopped: bool
) -> None:
    if not world.is_leader:
        return
    position = steps.position
    status = "preempted" if is_stopped else "completed"
    done = {"status": status, **facts, "steps": position.step, "epochs": position.epoch}
    failure_report.write_json(settings.run_dir / failure_report.SUMMARY, done)
    if is_stopped:
        after = f"epoch {position.epoch}" + (
            f", {counted(position.batch, 'step')} of it" if position.batch else ""
        )
        text = (
            f"stopped after step {position.step} ({after}) and saved; the same command resumes"
            " there"
        )
        print(text, file=sys.stderr)
