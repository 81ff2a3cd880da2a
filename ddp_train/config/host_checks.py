"""Checks of what this host has: data, packages, limits. Nothing is imported or written."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from ddp_train.config import run_directory
from ddp_train.config.code_checks import TRUSTED_TRACKERS, is_trusted
from ddp_train.config.packages import how_to_install_extra
from ddp_train.config.user_code import missing_package, tracker_class
from ddp_train.errors import ConfigError
from ddp_train.options.custom import trackers_of
from ddp_train.options.problem import Problem
from ddp_train.options.schema import Config, RequestedRun

LEAST_OPEN_FILES = 64
"""With 24 a process hung as it began, with 64 it trains."""


def problems(run: RequestedRun) -> Iterator[Problem]:
    config = run.config
    if config.mode not in ("export", "doctor"):  # the first reads no data, the second asks hosts
        yield from config.data.missing(config)
    yield from _trackers(config)
    yield from run_directory.problems(config)
    yield from open_files()


def _trackers(config: Config) -> Iterator[Problem]:
    """Packages that our trackers need. Those of yours are checked in rank 0."""
    for name, code in trackers_of(config.tracker.classes).items():
        if not is_trusted(code.target, TRUSTED_TRACKERS):
            continue
        try:
            missing = missing_package(tracker_class(name, code))
        except ConfigError as error:
            yield from (Problem("", message) for message in error.problems)
            continue
        if missing:
            remedy = how_to_install_extra(missing)
            yield Problem(f"tracker={name}", f"{missing} is not installed", remedy)


def open_files() -> Iterator[Problem]:
    """A limit on open files that is too low."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < LEAST_OPEN_FILES:
        yield Problem(
            "",
            f"a process may open {soft} files (ulimit -n), too few to connect the processes",
            "run `ulimit -n 1024` first",
        )
