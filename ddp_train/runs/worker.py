"""The entry of a worker, the process of one rank of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ddp_train.config.freeze import FILE, load_frozen, not_default, run_facts
from ddp_train.config.program import import_from_working_folder
from ddp_train.distributed.environment import world_from_environment
from ddp_train.distributed.preflight import agree
from ddp_train.distributed.process_group import Store, open_store, share_config
from ddp_train.distributed.world import World
from ddp_train.errors import PeerError, WriteError
from ddp_train.options.schema import Config
from ddp_train.resilience import heartbeat, stacks
from ddp_train.resilience.preemption import SAVED
from ddp_train.resilience.stdio import tolerate_closed_streams
from ddp_train.runs.failure_reporter import FailureReporter
from ddp_train.runs.training_run import TrainingRun
from ddp_train.runs.worker_process import (
    JOIN_SECONDS,
    WorkerProcess,
    die_with_parent,
    leave,
    leave_without_peers,
    opening_logs,
    prepare_gpu,
)
from ddp_train.telemetry.console import Display
from ddp_train.telemetry.log_files import start_logging
from ddp_train.telemetry.pages.live import LivePage


def main() -> NoReturn:
    """A worker of our own launcher, `python -m ddp_train.runs.worker RUN_DIR`.

    The config is frozen already.
    """
    tolerate_closed_streams()
    die_with_parent()
    import_from_working_folder()
    world = world_from_environment()
    assert world, "the launcher sets the environment of its workers"
    file = Path(sys.argv[1], FILE)
    try:
        config = load_frozen(file.read_text())
    except OSError as error:
        remedy = "start the same command again, and leave the run directory alone while it runs"
        gone = WriteError(f"{file} cannot be read as a process starts: {error.strerror}", remedy)
        worker = WorkerProcess(file.parent, world)
        code = FailureReporter(worker, {}).report(gone)
        worker.leave(code)
    leave(run(config, world, lambda: open_store(world, config.launch.join_timeout_seconds)))


def receive_config(
    world: World, text: str | None, timeout_seconds: float = JOIN_SECONDS
) -> tuple[Store, str]:
    """Send the frozen config from rank 0 of torchrun to the others, or leave if there is none.

    text: the config on rank 0; None on the others, which wait for it.
    timeout_seconds: the longest wait.
    """
    try:
        store = open_store(world, timeout_seconds)
        text = share_config(store, world, text)
    except PeerError as error:
        leave_without_peers(world, error)
    if not text:
        leave(2)
    return store, text


def run_under_torchrun(
    store: Store, world: World, argv: list[str], config: Config, text: str
) -> NoReturn:
    """Run once all ranks of all hosts agree on command line, versions and config.

    text: the frozen config.
    """
    run_dir = Path(str(config.run_dir))

    def store_after_preflight() -> Store:
        agree(store, world, argv, run_dir / FILE, text, config.launch.join_timeout_seconds)
        return store

    code = run(config, world, store_after_preflight)
    # There is no launcher of ours to do it.
    if world.is_leader and config.mode == "train" and config.launch.page:
        LivePage(run_dir, not_default(config)).write()
    leave(code)


def run(config: Config, world: World, get_store: Callable[[], Store]) -> int:
    """Do what the config's mode asks for, and report what goes wrong. Returns the exit code.

    get_store: joins the other processes; may raise LaunchError.
    """
    run_dir = Path(str(config.run_dir))
    worker = WorkerProcess(run_dir, world)
    hosts_may_leave = config.host_range is not None
    reporter = FailureReporter(worker, run_facts(config), hosts_may_leave=hosts_may_leave)
    launch = config.launch
    try:
        with opening_logs(worker.log_file):
            start_logging(worker.log_file, world.rank, to_terminal=world.is_leader)
            stacks.show_stacks(run_dir, world.rank)
        worker.status.keep_beating()
        device = world.device(config.device)
        if config.device == "cuda":
            prepare_gpu(config.train.memory_history, run_dir, world.rank, device)
        store = get_store() if config.strategy.has_process_group else None
        with worker.group(store, device, launch.backend, launch.timeout_seconds):
            display = Display(world.is_leader)
            is_complete = TrainingRun(config, worker, device, display).execute()
            worker.status.phase = heartbeat.END
        return worker.status.leaving(0 if is_complete else SAVED)
    except BaseException as error:  # noqa: BLE001  whatever it is, it is reported
        return reporter.log_and_report(error, launch.grace_seconds)


if __name__ == "__main__":
    main()
