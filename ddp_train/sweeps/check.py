"""What is wrong with the words of a sweep: its values, each in a trial, and what Hydra and Optuna
would refuse."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_train.config.overrides import Overrides, read_overrides, register_schema
from ddp_train.config.prepare import read_run, resolve_and_check
from ddp_train.config.program import Program
from ddp_train.config.validate import check_rules
from ddp_train.hardware import Hardware
from ddp_train.options.schema import Config
from ddp_train.sweeps import pool as trial_pool
from ddp_train.sweeps.sweep_overrides import LAUNCHER, OPTUNA, SWEEPER, key, last
from ddp_train.text import first_line

OWN = ("", "basic", OPTUNA)
"""Sweepers whose words are known here; "": the grid."""
PARAMS = "hydra.sweeper.params."
OF_GRID = (PARAMS, "hydra.sweeper.max_batch_size")


def parsed(word: str) -> Override:
    return OverridesParser.create().parse_override(word)


def each_once(words: list[str]) -> list[str]:
    """The last word about each key, as Hydra takes them. What a sweeper of our own draws by its
    parameters is given by name: Hydra itself has no such keys on a command line."""
    if last(words, SWEEPER) in OWN:
        words = [_by_name(word) if key(word).startswith(PARAMS) else word for word in words]
    return list({key(word): word for word in words}.values())


def _by_name(word: str) -> str:
    name, _, value = word.lstrip("+").removeprefix(PARAMS).partition("=")
    try:
        text = parsed(f"x={value}").value()
    except HydraException:  # it is named with all others
        return f"{name}={value}"
    return f"{name}={text if isinstance(text, str) else value}"  # without quotes


@dataclass
class Tried:
    """What trials with the values of a sweep have told."""

    fixed: list[str]
    """The words that all have."""
    told: dict[str, Any]
    """See trial_pool.told."""
    config: Config = field(default_factory=Config)
    """As typed, of the last one."""
    resolved: list[Config] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def try_values(
    program: Program, read: Overrides, sweep: bool, job_launcher: str, hardware: Hardware
) -> Tried:
    """Each value is tried together with the first values of the other keys; of an interval both
    ends."""
    fixed = [
        word for word in read.arguments if key(word) not in read.swept and not _is_hydras(word)
    ]
    told, found = trial_pool.told(read.arguments)
    tried = Tried(fixed, told, problems=[*read.problems, *found])
    ends = ends_of_intervals(read.arguments) if sweep else {}
    for name, values in read.swept.items():
        if name.startswith("sweep."):
            tried.problems += [
                f"{name}: is what all trials share, and cannot be swept; give it one value"
            ]
        if sweep and not values and name not in ends:
            tried.problems += [f"{name}: has no value to try: nothing matches"]
    swept = {name: values for name, values in (read.swept | ends).items() if values}
    first = {name: values[0] for name, values in swept.items()}
    for trial in [
        first,
        *(first | {name: value} for name, values in swept.items() for value in values[1:]),
    ]:
        words = [*fixed, *(f"{name}={value}" for name, value in trial.items())]
        config, found = read_run(program, read_overrides(program, words))
        tried.config, more = trial_pool.with_told(config, told)
        tried.problems += found + more
        if sweep and not found:
            found = trial_pool.refused(tried.config)
            if not found and job_launcher:  # it may run on another host
                found = check_rules(tried.config)
            elif not (found := found or trial_pool.problems(tried.config, hardware)):
                seen = trial_pool.hardware_of_trial(tried.config, hardware)
                run, found = resolve_and_check(tried.config, None, seen)
                tried.resolved += [] if found else [run]
            tried.problems += found
    tried.problems = [_whole_numbers(problem, ends) for problem in tried.problems]
    return tried


def ends_of_intervals(words: Iterable[str]) -> dict[str, list[str]]:
    """The least and the largest value of each key that is drawn from an interval."""
    found = {key(word): parsed(word).value() for word in words if "interval(" in word}
    return {
        name: [repr(end) for end in (interval.start, interval.end)]
        for name, interval in found.items()
        if isinstance(interval, IntervalSweep)
    }


def _whole_numbers(problem: str, ends: dict[str, list[str]]) -> str:
    """What is wrong with the end of an interval, and what draws whole numbers instead."""
    name, _, value = problem.partition(":")[0].partition("=")
    found = [float(end) for end in ends.get(name, ())]
    if (
        value in ends.get(name, ())
        and "whole number" in problem
        and all(end.is_integer() for end in found)
    ):
        low, high = map(int, found)
        return f"{problem}; for whole numbers use {name}=int(interval({low},{high}))"
    return problem


def problems(program: Program, arguments: list[str]) -> list[str]:
    """arguments: those for Hydra, which are right as far as one trial can tell."""
    sweeper = last(arguments, SWEEPER)
    own = [word for word in arguments if _is_hydras(word)]
    if swept := [word for word in own if parsed(word).is_sweep_override()]:
        return [
            f"{word}: is about all trials, and cannot be swept; give it one value" for word in swept
        ]
    if sweeper not in OWN:
        return []
    if sweeper != OPTUNA:
        found = [
            f"{word.lstrip('+')}: a grid needs values; name some, or let Optuna draw: add"
            f" {SWEEPER}={OPTUNA}"
            for word in arguments
            if key(word) in ends_of_intervals([word])
        ]
        found += [
            f"{word}: is of a sweeper that draws; add {SWEEPER}={OPTUNA}, or leave it out"
            for word in own
            if key(word).startswith(("hydra.sweeper.", f"{SWEEPER}/"))
            and not key(word).startswith(OF_GRID)
        ]
        if found:
            return found
    for name in ("launcher", "optuna_sweeper"):  # an editable install may hide them from Hydra
        importlib.import_module(f"hydra_plugins.ddp_train_pool.{name}")
    register_schema(program)
    launcher = [] if last(own, LAUNCHER) else [f"{LAUNCHER}=pool"]
    try:
        with hydra.initialize_config_dir(str(program.presets), version_base="1.3"):
            composed = hydra.compose("config", [*launcher, *own], return_hydra_config=True)
            if sweeper == OPTUNA:
                _try(composed.hydra.sweeper, [word for word in arguments if not _is_hydras(word)])
    except (HydraException, OmegaConfBaseException) as error:
        text = str(error).partition("Config search path")[0]
        cause = error.__cause__
        return [" ".join(f"{text} {first_line(cause) if cause else ''}".split())]
    return []


def _is_hydras(word: str) -> bool:
    return key(word).startswith(("hydra.", "hydra/"))


def _try(given: Any, words: list[str]) -> None:
    """Makes what our own sweeper would make, and draws once. Raises PoolError."""
    from hydra_plugins.ddp_train_pool.optuna_sweeper import PoolOptunaSweeper

    storage = OmegaConf.to_container(given, resolve=False)["storage"]  # type: ignore  it may name hydra.sweep.dir
    others = {str(name): given[name] for name in given if name not in ("storage", "_target_")}
    sweeper = PoolOptunaSweeper(**others, storage=storage)
    sweeper.checked(
        words, OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    )
