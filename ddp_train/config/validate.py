"""All checks of what can be known to be wrong before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ddp_train.config import (
    checkpoint_checks,
    code_checks,
    fine_tuning,
    host_checks,
    launch_checks,
    metrics,
    training_checks,
    tuning_checks,
)
from ddp_train.options.key import broken_rule
from ddp_train.options.problem import Problem
from ddp_train.options.schema import Config, RequestedRun
from ddp_train.text import shown


def check(run: RequestedRun) -> list[str]:
    """A message for each problem of a run. Its values must have passed `check_rules`."""
    return [str(problem) for problem in problems_of(run)]


def problems_of(run: RequestedRun) -> Iterator[Problem]:
    yield from launch_checks.problems(run)
    yield from training_checks.problems(run)
    config = run.config
    yield from config.strategy.problems(run)
    yield from config.model.problems(run)
    yield from config.task.problems(run)
    yield from config.data.problems(run)
    yield from config.optimizer.problems(run)
    yield from config.schedule.problems(run)
    yield from tuning_checks.problems(run)
    yield from metrics.problems(config)
    yield from code_checks.problems(config)
    yield from checkpoint_checks.problems(run)
    yield from fine_tuning.problems(config)
    yield from host_checks.problems(run)


def check_rules(config: Config) -> list[str]:
    """A message for each key of a run whose value breaks a rule that `options.key` declares."""
    return broken_rules_in(config, "")


def broken_rules_in(section: Any, prefix: str) -> list[str]:
    """A message for each key of a section, and of those within it, whose value breaks its rule.

    prefix: the beginning of the section's keys: "", or `train.`.
    """
    messages = []
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        key = f"{prefix}{f.name}"
        if dataclasses.is_dataclass(value):
            messages += broken_rules_in(value, f"{key}.")
            continue
        rule = broken_rule(value, f.metadata, key)
        if rule:
            messages.append(f"{key}={shown(value)}: {rule}")
    return messages
