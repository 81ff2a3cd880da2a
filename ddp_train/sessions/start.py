"""`ddp_train.session`: joins the processes of a run, or starts them. Torch-free.

They are started by running this script again in each. The process that does so only watches: it has
no rank, and ends with the exit code of the run where the `with` begins. The launcher does it
(`launcher/local.py`), as it does for `python launch.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_train.distributed.environment import (
    PROCESSES,
    draws_of_proof,
    launcher_pid,
    processes_asked,
    proof_folder,
    tasks_started,
    threads_asked,
    visible_devices,
    world_from_environment,
)
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.hardware import detect_hardware
from ddp_train.launcher.fork_server import ForkServer, can_fork
from ddp_train.launcher.local import launch
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.launcher.workload import Workload
from ddp_train.linux import keep_exit_codes
from ddp_train.options.schema import Config
from ddp_train.options.sections import LaunchConfig
from ddp_train.sessions.settings import (
    Settings,
    UsageError,
    in_words,
    is_interactive,
    lock_run_dir,
    trackers_of,
)
from ddp_train.telemetry.pages.live import LivePage
from ddp_train.telemetry.trackers.tracker import Tracker

if TYPE_CHECKING:
    from ddp_train.sessions.run import Run

TORCHRUN_ENDS_SECONDS = 35.0
"""The longest wait for the run directory in a restart: torchrun may still end the rank 0 before,
and sends SIGKILL 30 s after SIGTERM."""


@contextlib.contextmanager
def session(
    run_dir: str | os.PathLike[str],
    *,
    processes: int | None = None,
    device: str = "auto",
    seed: int = 0,
    keep: int = 2,
    max_restarts: int = 0,
    timeout_seconds: float = 600.0,
    grace_seconds: float = 30.0,
    log_every_steps: int = 50,
    trackers: Sequence[str | Tracker] = (),
    hyperparameters: Mapping[str, Any] | None = None,
) -> Iterator[Run]:
    """A context manager that runs your own training loop on any number of processes.

    docs/guides/own_loop.md shows a whole script. Under torchrun, the `with` joins torchrun's
    processes. Otherwise it starts processes that run the same command line from its beginning,
    watches them, and ends the original process with the exit code of the run. So the original
    process runs the code before the `with`, but never the code in it or after it.

    run_dir: folder of the run: checkpoints, logs, metrics.jsonl, report.html, failure.json,
        summary.json. The same folder again resumes the run.
    processes: None for the number in DDP_TRAIN_PROCESSES, else one per visible GPU, or two on the
        CPU. With 1 and no restarts everything runs in this process, without a process group.
    device: auto, cuda or cpu.
    seed: seed of the order of samples, and of torch's, numpy's and Python's global generators.
    keep: number of newest checkpoints that are kept.
    max_restarts: how often the processes are started again after failures, from the last step that
        all had done. Each step of progress sets the count back to 0.
    timeout_seconds: a process without progress for this time is treated as hanging.
    grace_seconds: time from a request to stop until the processes are killed.
    log_every_steps: steps between two lines of metrics.jsonl, which have the numbers of `run.log`.
    trackers: receivers of these lines: `tensorboard`, `wandb`, `mlflow`, or objects of classes
        derived from `ddp_train.Tracker`.
    hyperparameters: values that trackers show with the run, for example vars(args).

    Yields a `Run`. After a stop or an error it prints one line that says why and ends the process,
    with an exit code of docs/reference/files.md. In a notebook it raises instead.
    """
    with contextlib.ExitStack() as owned:
        try:
            world = world_from_environment()
            proof = proof_folder()
            first_draws = 0
            if proof:
                run_dir = proof
                first_draws = draws_of_proof()
                processes = None
                device = "cpu"
                max_restarts = 0
                trackers = ()
            count, device = _processes_and_device(processes, device)
            settings = Settings(
                run_dir=Path(run_dir).absolute(),
                processes=count,
                device=device,
                seed=seed,
                keep=keep,
                max_restarts=max_restarts,
                timeout_seconds=timeout_seconds,
                grace_seconds=grace_seconds,
                log_every_steps=log_every_steps,
                trackers=trackers_of(trackers),
                hyperparameters=hyperparameters or {},
                is_proof=proof is not None,
                first_draws=first_draws,
            )
            command = None
            if world is None and (settings.processes > 1 or max_restarts):
                command = _this_command()
            owned.enter_context(_only_session(world))
            _take_run_dir(settings.run_dir, world, owned)
            if world is None:
                _note_variable_without_effect(settings.processes)
            if command:
                raise SystemExit(_start(settings, *command))
            if world and world.is_leader and launcher_pid() is None:
                _note_what_torchrun_decides(world, processes, max_restarts)
        except ConfigError as error:
            if is_interactive():
                raise
            print(f"{error}\n  remedy: {error.remedy}", file=sys.stderr)
            raise SystemExit(error.exit_code) from None
        # It imports torch: the process that only watches does without.
        from ddp_train.sessions.process import joined

        with joined(settings, world or World(), alone=world is None) as run:
            yield run


@dataclasses.dataclass
class Sessions:
    """The sessions of this process so far."""

    open_in: int = 0
    """The process id of the process that has one open: a fork of it has none."""
    has_left_others: bool = False
    """The processes that were started for a session have ended it together."""


_sessions = Sessions()


@contextlib.contextmanager
def _only_session(world: World | None) -> Iterator[None]:
    """Inside, this process has a session. Raises UsageError if it cannot have another one."""
    if _sessions.open_in == os.getpid():
        raise _usage_error(
            "another session is open in this process",
            "end its `with` before the next one begins. Several models can be trained in one"
            " session",
        )
    if _sessions.has_left_others:
        raise _usage_error(
            "the processes of this command were started for one session, which has ended",
            "start a command for each session, or use processes=1 in all of them",
        )
    _sessions.open_in = os.getpid()
    try:
        yield
    finally:
        _sessions.open_in = 0
        _sessions.has_left_others = world is not None


def _take_run_dir(run_dir: Path, world: World | None, owned: contextlib.ExitStack) -> None:
    """Lock the run directory, on the process that answers for it. Raises UsageError.

    That is the one which starts the others or is alone; under torchrun rank 0.

    owned: unlocks it.
    """
    patience_seconds = 0.0
    if world is None:
        _check_started_once()
    elif not world.is_leader or launcher_pid() is not None:
        return
    elif world.attempt:
        patience_seconds = TORCHRUN_ENDS_SECONDS
    owned.enter_context(lock_run_dir(run_dir, patience_seconds))


def _check_started_once() -> None:
    """Raise UsageError if srun, mpirun or their like have started this script several times."""
    tasks = tasks_started()
    if tasks.count > 1:
        raise _usage_error(
            f"{tasks.command} started {tasks.count} processes of this script, and each of them"
            " would start a whole run",
            f"start the script once, or with torchrun. If you did not use {tasks.command}, first"
            f" run `unset {' '.join(tasks.variables)}`",
        )


def _processes_and_device(processes: int | None, device: str) -> tuple[int, str]:
    """The number of processes that this host starts, and cuda or cpu. Raises UsageError."""
    if device not in ("auto", "cuda", "cpu"):
        raise _usage_error(
            f"device={device!r} is not known",
            "use device='auto', 'cuda' or 'cpu'; each process gets its own GPU",
        )
    variable = processes_asked()
    if processes is None and variable is not None:
        if not variable.isdigit():
            raise UsageError(
                f"{PROCESSES}={variable} is not a number", f"use {PROCESSES}=2, or unset it"
            )
        processes = int(variable)
    gpus = 0 if device == "cpu" else detect_hardware(visible_devices()).gpus
    if not gpus:
        if device == "cuda":
            raise _usage_error("device='cuda', but no GPU is visible", "use device='cpu' or 'auto'")
        return (2 if processes is None else processes), "cpu"
    if processes is None:
        return gpus, "cuda"
    if processes > gpus:
        raise _usage_error(
            f"processes={processes}, but {gpus} GPUs are visible",
            f"use processes={gpus}, or device='cpu'",
        )
    return processes, "cuda"


def _note_variable_without_effect(processes: int) -> None:
    variable = processes_asked()
    if variable is not None and variable != str(processes):
        print(
            f"note: {PROCESSES}={variable} has no effect: the script says processes={processes}",
            file=sys.stderr,
        )


def _note_what_torchrun_decides(world: World, processes: int | None, max_restarts: int) -> None:
    ignored = []
    if processes and processes != world.local_size:
        ignored.append((f"processes={processes}", f"torchrun started {world.local_size}"))
    if max_restarts:
        ignored.append(
            (f"max_restarts={max_restarts}", f"use torchrun --max-restarts={max_restarts}")
        )
    for argument, reason in ignored:
        note = f"note: ddp_train.session: {argument} has no effect here: {reason}"
        print(note, file=sys.stderr)


def _start(settings: Settings, program: list[str], arguments: list[str]) -> int:
    """Run this script again in each process. Returns the exit code of the run.

    program, arguments: see `_this_command`.
    """
    cores = detect_hardware("").cpus
    threads = threads_asked() or max(1, cores // settings.processes)
    launch_config = LaunchConfig(
        nproc_per_node=settings.processes,
        max_restarts=settings.max_restarts,
        timeout_seconds=settings.timeout_seconds,
        grace_seconds=settings.grace_seconds,
        threads_per_process=threads,
        backend="nccl" if settings.device == "cuda" else "gloo",
    )
    config = Config(run_dir=str(settings.run_dir), device=settings.device, launch=launch_config)
    workload = Workload(
        program=tuple(program),
        arguments=lambda run_dir, rank: arguments,
        facts=lambda config: settings.facts(settings.processes),
        translate=in_words,
        page=LivePage(settings.run_dir, {}),
    )
    keep_exit_codes()
    server = ForkServer(None) if can_fork(program) else None
    sys.stdout.flush()
    try:
        return launch(config, None, StopRequests(program_ends=True), server, workload=workload)
    finally:
        if server:
            server.close()


def _this_command() -> tuple[list[str], list[str]]:
    """Python's options with the script or module that runs here, and the script's arguments."""
    if is_interactive():
        raise UsageError(
            "ddp_train.session starts its processes by running the script again, but a notebook"
            " or a prompt has no script",
            "write the loop into a file, and start that: python train.py. Here, use processes=1",
        )
    argv = sys.orig_argv[1:]
    first_argument = len(argv) - len(sys.argv) + 1
    program = argv[:first_argument]
    arguments = argv[first_argument:]
    if not program or program[-1] == "-" or arguments != sys.argv[1:]:
        command = " ".join(sys.orig_argv) or "it is not known"
        raise UsageError(
            "ddp_train.session: the command that started this process cannot be run again"
            f" ({command})",
            "start the script as a file: python train.py",
        )
    return program, arguments


def _usage_error(detail: str, remedy: str) -> UsageError:
    return UsageError(f"ddp_train.session: {detail}", remedy)
