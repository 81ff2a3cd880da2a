"""A worker process: joins the others, runs, reports its failure, and leaves with the right exit
code."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from ddp_train.config.auto import described
from ddp_train.config.freeze import FILE, load_frozen, not_default
from ddp_train.config.program import import_from_working_folder
from ddp_train.distributed import flight_record
from ddp_train.distributed.environment import launcher_pid, world_from_environment, write_exit_code
from ddp_train.distributed.preflight import agree
from ddp_train.distributed.process_group import Store, open_store, session, share_config
from ddp_train.distributed.world import World
from ddp_train.errors import LaunchError, NonFiniteLossError, PeerError, WriteError
from ddp_train.linux import end_with_parent
from ddp_train.options.schema import Config
from ddp_train.performance.memory_snapshot import snapshot_file, take_when_out_of_memory
from ddp_train.resilience import collectives, heartbeat, peer_check, stacks
from ddp_train.resilience.heartbeat import status_on_board
from ddp_train.resilience.preemption import SAVED
from ddp_train.resilience.stdio import tolerate_closed_streams
from ddp_train.resilience.whole_files import write_bytes
from ddp_train.runs.failure_reporter import FailureReporter
from ddp_train.runs.training_run import TrainingRun
from ddp_train.telemetry.console import Display
from ddp_train.telemetry.log_files import start_logging
from ddp_train.telemetry.pages.live import LivePage

WATCHED_SECONDS = 20 * 24 * 3600.0
"""Of collectives, where our own launcher watches: it ends a run that hangs, and knows the culprit.
Their clock goes on while a job is suspended (`scontrol suspend`), so that a shorter limit would end
the job when it is resumed. As milliseconds it fits into 32 bits, in which a library may count."""
JOIN_SECONDS = 600.0
"""The longest that ranks under torchrun wait for rank 0's config."""
log = logging.getLogger(__name__)


def main() -> NoReturn:
    """A worker of our own launcher, `python -m ddp_train.runs.worker RUN_DIR`: the config is
    frozen already."""
    tolerate_closed_streams()
    die_with_parent()
    import_from_working_folder()
    world = world_from_environment()
    assert world, "the launcher sets the environment of its workers"
    file = Path(sys.argv[1], FILE)
    try:
        config = load_frozen(file.read_text())
    except OSError as error:
        board, status = status_on_board(world)
        remedy = "start the same command again, and leave the run directory alone while it runs"
        gone = WriteError(f"{file} cannot be read as a process starts: {error.strerror}", remedy)
        leave(
            status.leaving(
                FailureReporter(file.parent, {}, world, status, board).report(gone, None)
            )
        )
    leave(run(config, world, lambda: open_store(world, config.launch.join_timeout_seconds)))


def receive_config(world: World, text: str | None) -> tuple[Store, str]:
    """A rank under torchrun: rank 0 brings the frozen config, the others wait for it. Leaves if
    there is none."""
    try:
        store = open_store(world, JOIN_SECONDS)
        text = share_config(store, world, text)
    except PeerError as error:
        print(f"FATAL peer (rank {world.rank}): {error}\n  remedy: {error.remedy}", file=sys.stderr)
        leave(error.exit_code)
    if not text:
        leave(2)
    return store, text


def run_under_torchrun(
    store: Store, world: World, argv: list[str], config: Config, text: str
) -> NoReturn:
    """Runs once all ranks of all hosts agree on command line, versions and config. text: the frozen
    config."""

    def store_after_preflight() -> Store:
        agree(
            store,
            world,
            argv,
            Path(str(config.run_dir), FILE),
            text,
            config.launch.join_timeout_seconds,
        )
        return store

    code = run(config, world, store_after_preflight)
    if (
        world.is_leader and config.mode == "train" and config.launch.page
    ):  # there is no launcher of ours to do it
        LivePage(Path(str(config.run_dir)), not_default(config)).write()
    leave(code)


def run(config: Config, world: World, get_store: Callable[[], Store]) -> int:
    """Trains or evaluates. Returns the exit code; reports what went wrong. get_store: may raise
    LaunchError."""
    run_dir = Path(str(config.run_dir))
    board, status = status_on_board(world)
    reporter = FailureReporter(run_dir, described(config), world, status, board)
    reporter.hosts_may_leave = config.host_range is not None
    store = None

    def leave_by_itself(code: int) -> NoReturn:
        leave(status.leaving(code))

    try:
        open_logs(run_dir, reporter.log_file, world)
        status.keep_beating()
        device = world.device(config.device)
        if config.device == "cuda":
            prepare_gpu(config.train.memory_history, run_dir, world.rank, device)
        if config.strategy.has_process_group:
            store = get_store()
            peer_check.register(store, world)
        timeout = WATCHED_SECONDS if board else config.launch.timeout_seconds
        backend = config.launch.backend
        with session(world, device, backend, store, timeout) if store else contextlib.nullcontext():
            record = collectives.record_file(run_dir, world.rank)
            status.on_hang = lambda: write_bytes(record, flight_record.dump())
            display = Display(world.is_leader)
            completed = TrainingRun(
                config, world, device, status, display, store, leave_by_itself, board
            ).execute()
            status.phase = heartbeat.END
        stacks.remove_empty_stacks(run_dir, world.rank)
        return status.leaving(0 if completed else SAVED)
    except BaseException as error:
        step = error.step if isinstance(error, NonFiniteLossError) else status.step
        log.error("failed in step %d, %s", step, status.phase, exc_info=error)
        return status.leaving(reporter.report(error, store))
    finally:
        status.wait_until_saved(config.launch.grace_seconds)


def open_logs(run_dir: Path, log_file: Path, world: World) -> None:
    """Raises WriteError if there can be none: then there will be no checkpoints either."""
    try:
        start_logging(log_file, world.rank, to_terminal=world.is_leader)
        stacks.show_stacks(run_dir, world.rank)
    except OSError as error:
        logging.getLogger().addHandler(logging.NullHandler())  # the report says it all
        remedy = "free space, or give permission to write there, and start the same command again"
        raise WriteError(
            f"the logs in {log_file.parent} cannot be written: {error.strerror}", remedy
        ) from error


def prepare_gpu(memory_history: bool, run_dir: Path, rank: int, device: str) -> None:
    torch.cuda.set_device(device)
    take_when_out_of_memory(snapshot_file(run_dir, rank), memory_history)


def die_with_parent() -> None:
    """Linux ends this process when the one that started it dies, even by SIGKILL: no worker is left
    behind."""
    expected = launcher_pid()
    end_with_parent()
    if expected is not None and os.getppid() != expected:  # it died before we could ask
        os._exit(LaunchError.exit_code)
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # no traceback per rank when torchrun hands Ctrl-C on


def leave(code: int) -> NoReturn:
    """Ends this process at once. After a failure a process group is still open, and tearing torch
    down takes 0.7 s."""
    for child in multiprocessing.active_children():
        child.kill()
    write_exit_code(code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
