"""Callbacks by which an application follows its sweep and decides about it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from hydra.core.utils import JobReturn


class SweepListener(Protocol):
    """Callbacks by which an application follows its sweep and decides about it.

    Derive a class, override what you need, and call Hydra inside of `listening(...)`. Everything
    is called in the process that starts the jobs. `overrides` are those of one job.
    """

    def before_jobs(self) -> None:
        """Called before the first of the jobs that Hydra launches together.

        This is once in a sweep, or once for each batch of a sweeper that launches several batches.
        """

    def job_number(self, number: int, overrides: list[str]) -> int:
        """The number that a job gets, and with it its folder. Called once for each job.

        number: the one that Hydra gives it.
        """
        return number

    def known_value(self, number: int, overrides: list[str]) -> float | None:
        """The return value of a job, if it is known already; None: the job must run."""
        return None

    def job_started(self, number: int, overrides: list[str], devices: list[str]) -> None:
        """A job runs. devices: what it was given; none: it uses no GPU."""

    def while_waiting(self) -> None:
        """Called ten times a second while jobs run."""

    def job_ended(
        self, number: int, overrides: list[str], returned: JobReturn, exit_code: int, seconds: float
    ) -> None:
        """A job has ended. `returned` may be changed before Hydra gets it."""

    def job_alone(self) -> tuple[int, list[str]] | None:
        """The number and the overrides of a job that runs alone after all others, or None."""
        return None

    def report_problem(self, problem: str) -> int | None:
        """Report why the sweep cannot run, or continue, and return its exit code.

        None: Hydra reports it.
        """
        return None

    # --- what hydra/sweeper=pool_optuna calls ---

    def values_so_far(self, number: int) -> Sequence[float]:
        """The values of the objective that a running job has reported, in their order."""
        return ()

    def job_pruned(self, number: int, count: int, value: float) -> None:
        """A job will be stopped after `count` values, of which `value` is the last."""

    def study_overrides(self, fixed: list[str]) -> list[str]:
        """Those of the fixed overrides that distinguish one study from another."""
        return fixed


class NoListener(SweepListener):
    """The listener of an application that has none."""


_listeners: list[SweepListener] = [NoListener()]


@contextlib.contextmanager
def listening(listener: SweepListener) -> Iterator[None]:
    """Register a listener for the sweeps that run inside."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()


def current_listener() -> SweepListener:
    """The listener that was registered last."""
    return _listeners[-1]
