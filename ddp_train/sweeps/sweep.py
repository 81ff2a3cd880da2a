"""A sweep, from its plan to its exit code. Hydra asks for the trials."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig

from ddp_train.config.presets import register_schema
from ddp_train.config.program import CONFIG_DIR, Program
from ddp_train.errors import ConfigError
from ddp_train.launcher.fork_server import ForkServer
from ddp_train.resilience.preemption import stop_signals
from ddp_train.sweeps.lock import sweep_lock
from ddp_train.sweeps.plan import SweepPlan
from ddp_train.sweeps.pool_listener import PoolListener
from ddp_train.sweeps.runner import TrialRunner
from ddp_train.sweeps.sweep_state import SweepState
from hydra_plugins.ddp_train_pool import listening


def run_sweep(program: Program, plan: SweepPlan, server: ForkServer | None) -> int:
    """Run all trials, print their results and write the page. Returns the exit code.

    Raises ConfigError before any trial starts.
    """
    state = SweepState(plan)
    runner = TrialRunner(program, state, server)
    if plan.job_launcher:
        results = state.results.path
        print(
            f"trials are run by hydra/launcher={plan.job_launcher}; results: {results}", flush=True
        )
    listener = PoolListener(runner)
    with _ended_by_signals(listener):
        try:
            return _run_trials(program, runner, listener)
        finally:
            if state.rows:
                runner.page.write_last()


@contextlib.contextmanager
def _ended_by_signals(listener: PoolListener) -> Iterator[None]:
    """Have a stop signal end the sweep with its table and its page, while no trial runs.

    Those that run record it first: `StopRequests`.
    """
    previous = {number: signal.signal(number, listener.end_by_signal) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run_trials(program: Program, runner: TrialRunner, listener: PoolListener) -> int:
    with sweep_lock(runner.plan.sweep_dir), listening(listener):
        runner.state.open()
        try:
            call_hydra(program, [*runner.plan.hydra_arguments], runner.run)
        finally:
            finish(runner)
    return runner.state.exit_code()


def call_hydra(
    program: Program, arguments: list[str], task_function: Callable[[DictConfig], Any]
) -> None:
    """Have Hydra read a command line, and run trials or show what it was asked for.

    Raises SystemExit.
    """
    register_schema(program)
    config_dir = [f"{CONFIG_DIR[1]}={program.own}"] if program.own else []
    sys.argv = [sys.argv[0], *config_dir, *arguments]
    main = hydra.main(config_path=str(program.presets), config_name="config", version_base="1.3")(
        task_function
    )
    try:
        main()
    except BaseException as error:
        # Hydra has printed it, and exits with 1
        if isinstance(error.__context__, HydraException):
            raise SystemExit(ConfigError.exit_code) from None
        raise


def finish(runner: TrialRunner) -> None:
    """Print the results of the trials so far."""
    runner.state.close()
    if runner.state.rows:
        runner.page.print_results()
        print(f"results {runner.state.results.path}")
