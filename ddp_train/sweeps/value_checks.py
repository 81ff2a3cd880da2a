"""Checks of a sweep's overrides: each value in a trial, and what Hydra and Optuna would refuse."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_train.config.overrides import Overrides, read_overrides
from ddp_train.config.prepare import read_run, resolve_and_check
from ddp_train.config.presets import register_schema, search_path_of
from ddp_train.config.program import Program
from ddp_train.config.validate import check_rules
from ddp_train.hardware import Hardware
from ddp_train.options.schema import Config
from ddp_train.sweeps import pool
from ddp_train.sweeps.overrides import is_of_hydra, key_of, last_value, parsed
from ddp_train.sweeps.sweeper import LAUNCHER, OPTUNA, PARAMS, SWEEPER
from ddp_train.text import first_line

KNOWN_SWEEPERS = ("", "basic", OPTUNA)
"""Sweepers whose overrides are checked here; empty: the grid."""


def last_of_each_key(overrides: list[str]) -> list[str]:
    """The last override of each key, which is the one that counts for Hydra.

    Parameters of a known sweeper are given by their own names: Hydra has no such keys on a command
    line.
    """
    if last_value(overrides, SWEEPER) in KNOWN_SWEEPERS:
        overrides = [_by_name(override) for override in overrides]
    return list({key_of(text): text for text in overrides}.values())


def _by_name(override: str) -> str:
    """`hydra.sweeper.params.x='interval(0,1)'` as `x=interval(0,1)`; others stay as they are."""
    if not key_of(override).startswith(PARAMS):
        return override
    name, _, value = override.lstrip("+").removeprefix(PARAMS).partition("=")
    try:
        content = parsed(f"x={value}").value()
    except HydraException:  # which is reported with all others
        return f"{name}={value}"
    without_quotes = content if isinstance(content, str) else value
    return f"{name}={without_quotes}"


@dataclass
class TriedValues:
    """The result of `try_values`."""

    fixed: list[str]
    """The overrides that all trials have."""
    settings: pool.LauncherSettings
    config: Config = field(default_factory=Config)
    """The config of the last trial, as typed."""
    resolved: list[Config] = field(default_factory=list)
    """Configs of the trials that can run on this host."""
    problems: list[str] = field(default_factory=list)


def try_values(
    program: Program, read: Overrides, hardware: Hardware, elsewhere: bool
) -> TriedValues:
    """Compose a trial for each value, together with the first values of the other keys.

    Both ends of an interval are tried.

    elsewhere: the trials may run on another host.
    """
    fixed = [
        override
        for override in read.arguments
        if key_of(override) not in read.swept and not is_of_hydra(override)
    ]
    settings, problems = pool.read_settings(read.arguments)
    ends = ends_of_intervals(read.arguments)
    tried = TriedValues(fixed, settings)
    tried.problems = [*read.problems, *problems, *_unswept(read, ends)]
    swept = {key: values for key, values in (read.swept | ends).items() if values}
    for values in _combinations(swept):
        overrides = [*fixed, *(f"{key}={value}" for key, value in values.items())]
        _try_trial(tried, program, overrides, hardware, elsewhere)
    tried.problems = [_with_whole_numbers(problem, ends) for problem in tried.problems]
    return tried


def _unswept(read: Overrides, ends: dict[str, list[str]]) -> Iterator[str]:
    """Keys that cannot be swept, or have no value."""
    for key, values in read.swept.items():
        if key.startswith("sweep."):
            yield f"{key}: is what all trials share, and cannot be swept; give it one value"
        if not values and key not in ends:
            yield f"{key}: has no value to try: nothing matches"


def _combinations(swept: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    """The first values of all keys, then each other value with the first ones of the others."""
    first = {key: values[0] for key, values in swept.items()}
    yield first
    for key, values in swept.items():
        for value in values[1:]:
            yield first | {key: value}


def _try_trial(
    tried: TriedValues, program: Program, overrides: list[str], hardware: Hardware, elsewhere: bool
) -> None:
    """Compose and check one trial."""
    config, problems = read_run(program, read_overrides(program, overrides))
    tried.config, contradictions = pool.with_settings(config, tried.settings)
    tried.problems += problems + contradictions
    if problems:
        return
    problems = pool.trial_problems(tried.config)
    if not problems and elsewhere:
        problems = check_rules(tried.config)
    elif not problems:
        problems = pool.pool_problems(tried.config, hardware)
        if not problems:
            visible = pool.hardware_of_trial(tried.config, hardware)
            resolved, problems = resolve_and_check(tried.config, None, visible)
            if not problems:
                tried.resolved.append(resolved)
    tried.problems += problems


def ends_of_intervals(overrides: Iterable[str]) -> dict[str, list[str]]:
    """The least and the greatest value of each key that is drawn from an interval."""
    ends = {}
    for override in overrides:
        if "interval(" not in override:
            continue
        value = parsed(override).value()
        if isinstance(value, IntervalSweep):
            ends[key_of(override)] = [repr(value.start), repr(value.end)]
    return ends


def _with_whole_numbers(problem: str, ends: dict[str, list[str]]) -> str:
    """A problem with the end of an interval, and how to draw whole numbers instead."""
    key, _, value = problem.partition(":")[0].partition("=")
    if "whole number" not in problem or value not in ends.get(key, ()):
        return problem
    low, high = map(float, ends[key])
    if not (low.is_integer() and high.is_integer()):
        return problem
    return f"{problem}; for whole numbers use {key}=int(interval({int(low)},{int(high)}))"


def hydra_problems(program: Program, arguments: list[str]) -> list[str]:
    """What Hydra and Optuna would refuse of arguments that are right for single trials."""
    sweeper = last_value(arguments, SWEEPER)
    if sweeper in ("", "basic"):
        intervals = [argument for argument in arguments if ends_of_intervals([argument])]
        if intervals:
            return [
                f"{argument.lstrip('+')}: a grid needs values; name some, or let Optuna draw: add"
                f" {SWEEPER}={OPTUNA}"
                for argument in intervals
            ]
    for name in ("launcher", "optuna_sweeper"):  # an editable install may hide them from Hydra
        importlib.import_module(f"hydra_plugins.ddp_train_pool.{name}")
    register_schema(program)
    if not last_value(arguments, LAUNCHER):
        arguments = [f"{LAUNCHER}={pool.POOL}", *arguments]
    arguments = [*arguments, *search_path_of(program)]
    try:
        with hydra.initialize_config_dir(str(program.presets), version_base="1.3"):
            application = GlobalHydra.instance().hydra
            assert application is not None
            composed = application.compose_config(
                "config",
                arguments,
                run_mode=RunMode.MULTIRUN,
                from_shell=False,
                with_log_configuration=False,
            )
            if sweeper == OPTUNA:
                of_trials = [argument for argument in arguments if not is_of_hydra(argument)]
                _draw_once(composed.hydra.sweeper, of_trials)
    except (HydraException, OmegaConfBaseException) as error:
        text = str(error).partition("Config search path")[0]
        cause = first_line(error.__cause__) if error.__cause__ else ""
        return [" ".join(f"{text} {cause}".split())]
    return []


def _draw_once(node: DictConfig, overrides: list[str]) -> None:
    """Build what our own sweeper would build, and draw once. Raises PoolError.

    node: hydra.sweeper.
    """
    from hydra_plugins.ddp_train_pool.optuna_sweeper import PoolOptunaSweeper

    # not resolved: it may name hydra.sweep.dir
    storage = OmegaConf.to_container(node, resolve=False)["storage"]  # type: ignore
    others = {str(name): node[name] for name in node if name not in ("storage", "_target_")}
    sweeper = PoolOptunaSweeper(**others, storage=storage)
    config_loader = GlobalHydra.instance().config_loader()
    sweeper.checked(overrides, OverridesParser.create(config_loader=config_loader))
