"""What one process does: open the session, train or evaluate, sum up, leave with the right exit code."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from ddp_train import stdio
from ddp_train.config.auto import described, reasons
from ddp_train.config.freeze import FILE, load_frozen, to_values
from ddp_train.config.hardware import detect_hardware
from ddp_train.config.schema import Config
from ddp_train.data.datasets import BatchSource, build_datasets, check_same_data, digests
from ddp_train.distributed.environment import (
    launcher_pid,
    status_descriptor,
    visible_devices,
    world_from_environment,
    write_exit_code,
    write_reported,
    write_torchrun_error_file,
)
from ddp_train.distributed.preflight import agree
from ddp_train.distributed.process_group import (
    Store,
    local_leader_first,
    open_store,
    same_everywhere,
    session,
    set_buffers,
    share_config,
)
from ddp_train.distributed.world import World
from ddp_train.errors import LaunchError, PeerError
from ddp_train.linux import end_with_parent
from ddp_train.performance import switches
from ddp_train.resilience import failure_report, heartbeat, peer_check
from ddp_train.resilience.preemption import SAVED, StopController
from ddp_train.task import Score
from ddp_train.telemetry import console
from ddp_train.telemetry.hardware_monitor import hardware_monitor_for
from ddp_train.telemetry.metrics_log import MetricsFile
from ddp_train.telemetry.tracker_queue import Tracking, tracked
from ddp_train.text import counted
from ddp_train.training import checkpoint
from ddp_train.training.checkpoint import Writer
from ddp_train.training.hooks import Record, Save
from ddp_train.training.loop import Job, evaluate, fit
from ddp_train.training.setup import advice, build_evaluation, build_job, build_module, first_batch, plan_rows

PEER_ERROR_GRACE_SECONDS = 3.0
"""How long a worker that failed through another one waits for that one to report, before it reports itself."""
LAUNCHER_FIRST_SECONDS = 5.0
"""Collectives wait so much longer than the launcher, which knows who is guilty: it ends a run that stands still."""
log = logging.getLogger(__name__)


Attendant = Callable[[Config, World, Job], contextlib.AbstractContextManager[Any]]
"""What goes on around training, given its job before the first step: it may replace collaborators of the loop."""


def main(attendant: Attendant | None = None) -> NoReturn:
    """A worker of our own launcher, `python -m ddp_train.training.worker RUN_DIR`: the config is frozen already."""
    stdio.tolerate_closed_streams()
    die_with_parent()
    world = world_from_environment()
    assert world, "the launcher sets the environment of its workers"
    config = load_frozen(Path(sys.argv[1], FILE).read_text())
    join_timeout = config.launch.join_timeout_seconds
    leave(run(config, world, lambda: open_store(world, join_timeout), attendant))


Wing = Callable[[Store, World, list[str], Config], int]
"""What is done in place of a run, with the words of the command line: returns the exit code."""


def join(
    world: World, argv: list[str], text: str | None, doctor: Wing | None = None, timeout_seconds: float = 600.0
) -> NoReturn:
    """A worker of torchrun. Rank 0 brings the frozen config; the others wait for it, and leave if there is none.

    doctor: takes over if the config says mode=doctor.
    """
    die_with_parent()
    try:
        store = open_store(world, timeout_seconds)
        text = share_config(store, world, text)
    except PeerError as error:
        print(f"FATAL peer (rank {world.rank}): {error}\n  remedy: {error.remedy}", file=sys.stderr)
        leave(error.exit_code)
    if not text:
        leave(2)
    config = load_frozen(text)
    if config.mode == "doctor" and doctor:
        leave(doctor(store, world, argv, config))

    def checked_store() -> Store:
        agree(store, world, argv, Path(str(config.run_dir), FILE), text, config.launch.join_timeout_seconds)
        return store

    leave(run(config, world, checked_store))


def run(config: Config, world: World, get_store: Callable[[], Store], attendant: Attendant | None = None) -> int:
    """Trains or evaluates. Returns the exit code; reports what went wrong."""
    run_dir = Path(str(config.run_dir))
    # Where the user reads: standard error may become this rank's log file.
    terminal = stdio.TolerantStream(os.fdopen(os.dup(2), "w"))
    log_file = run_dir / "logs" / f"rank_{world.rank}.log"
    descriptor, store = status_descriptor(), None
    board = None if descriptor is None else heartbeat.StatusBoard(descriptor, world.local_size)  # torchrun has none
    status = board.ranks[world.rank] if board else heartbeat.RankStatus()
    try:
        console.start_logging(log_file, world.rank, to_terminal=world.is_leader)
        heartbeat.show_stacks(run_dir, world.rank)
        status.keep_beating()
        device = world.device(config.device)
        if config.device == "cuda":
            torch.cuda.set_device(device)
        grouped = config.strategy.name == "ddp"
        timeout = _watched_timeout(config) if board else config.launch.timeout_seconds
        if grouped:
            store = get_store()
            peer_check.register(store, world)
        with session(world, device, config.launch.backend, store, timeout) if store else contextlib.nullcontext():
            completed = _work(config, world, device, run_dir, status, store, attendant)
            status.phase = heartbeat.END  # the launcher asks for it: exit code 0 alone is not the end of a run
        heartbeat.remove_empty_stacks(run_dir, world.rank)
        return 0 if completed else SAVED
    except BaseException as error:
        log.error("failed in step %d, %s", status.step, status.phase, exc_info=error)
        peer_error = failure_report.is_peer_error(error)
        secondary = peer_error or getattr(error, "rank", None) not in (None, world.rank)
        patience = PEER_ERROR_GRACE_SECONDS
        if peer_error and store and not board and not peer_check.respond(store, world, status):
            patience = 0.0  # with the store, rank 0's host is gone: torchrun's agent here will end all this soon
        if secondary and failure_report.wait_for_report(run_dir, patience):
            return LaunchError.exit_code
        sizes = board.sizes() if board else f"rank {world.rank} {status.resident_bytes / 2**30:.2f} GiB"
        failure = failure_report.failure_from(error, world.rank, status, log_file, sizes)
        if peer_error and store and not board:
            failure = peer_check.attribute_failure(failure, error, store, world)
        trace = "" if peer_error else failure_report.traceback_of(error)
        if failure_report.report(run_dir, failure, described(config), trace, terminal):
            write_reported()
            write_torchrun_error_file(failure_report.headline(failure).removeprefix("FATAL "))
        return failure.exit_code
    finally:
        status.wait_until_saved(config.launch.grace_seconds)


def _watched_timeout(config: Config) -> float:
    """Of collectives, where our own launcher watches."""
    return max(config.launch.timeout_seconds, heartbeat.START_SECONDS) + LAUNCHER_FIRST_SECONDS


def _work(
    config: Config,
    world: World,
    device: str,
    run_dir: Path,
    status: heartbeat.RankStatus,
    store: Store | None,
    attendant: Attendant | None = None,
) -> bool:
    """Everything between the opening of the session and its end. What it builds is gone when it returns.

    Returns whether the run is completed; if not, it was stopped and saved.
    """
    switches.set_process_flags(config)
    display = console.Display(active=world.is_leader, status=status)
    status.phase = "data set"
    with local_leader_first(world, device) if getattr(config.data, "download", False) else contextlib.nullcontext():
        sources = build_datasets(config.data, config.seed)
    status.phase = "build"
    restarted = checkpoint.find("auto", run_dir) if world.attempt and config.mode == "train" else None
    found = restarted or checkpoint.find(config.checkpoint.resume, run_dir)
    same_everywhere(checkpoint.read_manifest(found)["step"] if found else -1, device, f"the checkpoint in {run_dir}")
    with tracked(config, run_dir, world.is_leader) as tracking:
        if config.mode == "evaluate":
            assert found, "config.check asks for a checkpoint, and find raises if it is not valid"
            summary = _evaluate(config, world, device, status, sources, found)
            display.line(f"checkpoint {found}")
        else:
            summary = _train(
                config, world, device, run_dir, status, display, sources, found, store, tracking, attendant
            )
        if world.is_leader:
            failure_report.write_json(run_dir / failure_report.SUMMARY, summary)
            display.summary(summary, run_dir)
        tracking.finish(summary)
    return summary["status"] == "completed"


def _train(
    config: Config,
    world: World,
    device: str,
    run_dir: Path,
    status: heartbeat.RankStatus,
    display: console.Display,
    sources: tuple[BatchSource, BatchSource],
    found: Path | None,
    store: Store | None,
    tracking: Tracking,
    attendant: Attendant | None = None,
) -> dict[str, Any]:
    manifest: dict[str, Any] = checkpoint.read_manifest(found) if found else {"step": 0}
    module = build_module(config, sources[0], device)
    job = build_job(config, world, device, module, sources, status, first_step=manifest["step"])
    metrics = MetricsFile(run_dir, world.is_leader, job.step)
    record = Record(
        display,
        metrics,
        device,
        config.train.epochs,
        config.train.log_every_steps,
        config.train.evaluate_every_epochs,
        status,
        hardware_monitor_for(device, config.strategy.name == "dp", status),
    )
    data_digests = digests(sources[0])
    if found:
        if run_dir in found.parents:
            check_same_data(config.data, manifest["data_digests"], data_digests)
        checkpoint.load_model(found, module.model)
        training = checkpoint.load_training(found)
        if len(training["buffers"]) == world.size > 1:
            set_buffers(module, training["buffers"][world.rank])
        job.stepper.load_state(training)
        record.load_state(training["record"])
    job.stepper.continue_from(job.step)
    writer = Writer(run_dir, config.checkpoint.keep, config.checkpoint.best, status) if world.is_leader else None
    facts = {"config": to_values(config), "world_size": world.size, "torch": torch.__version__}
    save = Save(writer, record, {**facts, "data_digests": data_digests}, config.checkpoint, status)
    tracking.start(job.step, metrics.kept)
    metrics.listeners.append(tracking.write)
    details = tracking.hooks(job, lambda: first_batch(config, job.plan, sources[0], device, heartbeat.RankStatus()))
    job.hooks = [record, save, *details]
    job.stop = job.evaluation.stop = stop = StopController()
    if world.is_leader:
        display.plan(plan_rows(config, job, reasons(config, detect_hardware(visible_devices()))))
        for line in advice(config, module, sources[0]):
            display.line(line)
    if job.step >= job.plan.steps:
        display.line(f"nothing is left to train: {counted(job.step, 'step')} done, {job.plan.steps:,} were asked for")
    display.start(job.step, job.plan.steps)
    record.start_clocks(job.step)
    connection = store.clone() if store else None
    try:
        listening = stop.listening(status, world, connection, config.launch.grace_seconds / 2, leave)
        attended = attendant(config, world, job) if attendant else contextlib.nullcontext()
        with listening, attended, switches.frozen_gc(config.tuning):
            fit(job)
            # Without a score at the end, nothing was left to train: the run was complete already.
            score = None if job.step < job.plan.steps else record.score or evaluate(job.evaluation)
    finally:
        display.stop()
    samples_seen = job.plan.samples_seen(job.step)
    trained = sum(record.epoch_seconds) if score else record.seconds
    return _summary(
        config,
        device,
        score,
        steps=job.step,
        seconds=record.seconds,
        samples_seen=samples_seen,
        epoch_seconds=record.epoch_seconds,
        samples_per_second=samples_seen / trained if trained else None,
        figures=record.figures.summary(),
    )


def _evaluate(
    config: Config,
    world: World,
    device: str,
    status: heartbeat.RankStatus,
    sources: tuple[BatchSource, BatchSource],
    found: Path,
) -> dict[str, Any]:
    module = build_module(config, sources[0], device)
    checkpoint.load_model(found, module.model)
    evaluation = build_evaluation(config, world, device, module, sources[1], status)
    began = time.perf_counter()
    score = evaluate(evaluation)
    return _summary(
        config, device, score, steps=checkpoint.read_manifest(found)["step"], seconds=time.perf_counter() - began
    )


def _summary(config: Config, device: str, score: Score | None, **numbers: Any) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if config.device == "cuda" else "cpu"
    return {
        "status": "completed" if score else "preempted",
        **described(config),
        "device_name": name,
        "torch": torch.__version__,
        **numbers,
        "test": score.as_dict() if score else None,
    }


def die_with_parent() -> None:
    """Linux ends this process when the one that started it dies, even by SIGKILL: no worker is left behind."""
    expected = launcher_pid()
    end_with_parent()
    if expected is not None and os.getppid() != expected:  # it died before we could ask
        os._exit(LaunchError.exit_code)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback per rank when torchrun hands Ctrl-C on


def leave(code: int) -> NoReturn:
    """Ends this process at once. After a failure a process group is still open, and tearing torch down takes 0.7 s."""
    for child in multiprocessing.active_children():
        child.kill()
    write_exit_code(code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
