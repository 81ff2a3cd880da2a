"""Checks of a sweep's overrides: each value in a trial, and what Hydra and Optuna would refuse."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_train.config.overrides import Overrides, read_overrides
from ddp_train.config.prepare import read_run, resolve_and_check
from ddp_train.config.program import PRESETS, Program
from ddp_train.config.validate import check_rules
from ddp_train.hardware import Hardware
from ddp_train.options.schema import Config
from ddp_train.sweeps import pool
from ddp_train.sweeps.composed_sweep import composed_sweep
from ddp_train.sweeps.overrides import is_of_hydra, key_of, last_value, parsed
from ddp_train.sweeps.sweeper import KNOWN_SWEEPERS, LAUNCHER, OPTUNA, PARAMS, SWEEPER
from ddp_train.text import dotted, first_line, shown

READ_ONCE = ("launcher", "sweeper", "sweep")
"""Parts of `hydra` that Hydra reads once for a sweep."""
SEED = "seed"
SHARED = ("run_dir", "objective")
"""Keys of a run that all trials share, beside those of `sweep`."""


def last_of_each_key(overrides: list[str]) -> list[str]:
    """The last override of each key, which is the one that counts for Hydra.

    Parameters of a known sweeper are given by their own names: Hydra has no such keys on a command
    line.
    """
    if last_value(overrides, SWEEPER) in KNOWN_SWEEPERS:
        overrides = [word for override in overrides for word in _by_name(override)]
    return list({key_of(text): text for text in overrides}.values())


def _by_name(override: str) -> list[str]:
    """`hydra.sweeper.params.x='interval(0,1)'`, or `hydra.sweeper.params={x:'interval(0,1)'}`, as
    `x=interval(0,1)`; others stay as they are."""
    key = key_of(override)
    value = override.partition("=")[2]
    name = key.removeprefix(PARAMS)
    if f"{key}." != PARAMS and name == key:
        return [override]
    try:
        content = parsed(f"x={value}").value()
    except HydraException:  # which is reported with all others
        return [f"{name}={value}"]
    if isinstance(content, dict):
        prefix = "" if name == key else f"{name}."
        return [f"{name}={shown(item)}" for name, item in dotted(content, prefix).items()]
    return [f"{name}={content if isinstance(content, str) else value}"]


@dataclass
class TriedValues:
    """The result of `try_values`."""

    fixed: list[str]
    """The overrides that all trials have."""
    settings: pool.LauncherSettings
    configs: list[Config] = field(default_factory=list)
    """The configs of the trials, as typed."""
    resolved: list[Config] = field(default_factory=list)
    """Configs of the trials that can run on this host."""
    problems: list[str] = field(default_factory=list)
    tied_to_seed: frozenset[str] = frozenset()
    """Keys that another seed changes too."""

    @property
    def config(self) -> Config:
        """The config of the last trial, as typed."""
        return self.configs[-1]


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
    combinations = [*_combinations(swept)]
    for values in combinations:
        overrides = [*fixed, *(f"{key}={value}" for key, value in values.items())]
        _try_trial(tried, program, overrides, hardware, elsewhere)
    if not tried.problems:
        tried.problems += _not_shared(tried.configs)
        tried.tied_to_seed = tied_to_seed(combinations, tried.configs)
    tried.problems = [_with_whole_numbers(problem, ends) for problem in tried.problems]
    return tried


def _unswept(read: Overrides, ends: dict[str, list[str]]) -> Iterator[str]:
    """Keys that cannot be swept, or have no value."""
    for key, values in read.swept.items():
        if key in SHARED or key.startswith("sweep."):
            yield f"{key}: all trials share this key, so it cannot be swept; give it one value"
        if not values and key not in ends:
            yield (
                f"{key}: no option matches the pattern, so there is no value to try; correct the"
                " pattern"
            )


def _not_shared(configs: Sequence[Config]) -> Iterator[str]:
    """Keys that all trials must share, but that a preset or a reference changes between them."""
    first = configs[0]
    for config in configs[1:]:
        ones, others = _shared_values(first), _shared_values(config)
        for key, one in ones.items():
            other = others[key]
            if one != other:
                yield (
                    f"{key}={shown(other)}: all trials share this key, but another trial has"
                    f" {key}={shown(one)}; give it one value"
                )
                return


def _shared_values(config: Config) -> dict[str, Any]:
    """The keys that all trials of a sweep share, with their values."""
    values = {key: getattr(config, key) for key in SHARED}
    return values | dotted(asdict(config.sweep), "sweep.")


def tied_to_seed(
    combinations: Sequence[Mapping[str, str]], configs: Sequence[Config]
) -> frozenset[str]:
    """The keys that change with the seed, as by `train.epochs='${seed}'`, but for other seeds.

    combinations: the swept values of each config, the first of all keys first.
    """
    tied: set[str] = set()
    before = dotted(asdict(configs[0]))
    for values, config in zip(combinations, configs, strict=True):
        changed = [key for key, value in values.items() if value != combinations[0][key]]
        if changed == [SEED]:
            now = dotted(asdict(config))
            tied |= {key for key in now if now[key] != before.get(key) and SEED not in key}
    return frozenset(tied)


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
    read = read_overrides(program, overrides)
    read.is_of_trial = True
    config, problems = read_run(program, read)
    typed, contradictions = pool.with_settings(config, tried.settings)
    tried.configs.append(typed)
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
    typed = shlex.quote(f"{key}=int(interval({int(low)},{int(high)}))")
    return f"{problem}; for whole numbers use {typed}"


def hydra_problems(
    program: Program, arguments: list[str], swept: Mapping[str, Sequence[str]]
) -> list[str]:
    """Arguments that Hydra and Optuna would refuse though they are right for single trials.

    swept: keys and the values that are tried.
    """
    sweeper = last_value(arguments, SWEEPER)
    if sweeper in ("", "basic"):
        intervals = [argument for argument in arguments if ends_of_intervals([argument])]
        if intervals:
            return [
                f"{argument.lstrip('+')}: a grid needs a list of values, not an interval; list"
                f" the values, or add {SWEEPER}={OPTUNA} to sample the interval"
                for argument in intervals
            ]
    if not last_value(arguments, LAUNCHER):
        arguments = [f"{LAUNCHER}={pool.POOL}", *arguments]
    try:
        with composed_sweep(program, arguments) as composed:
            if sweeper == OPTUNA:
                of_trials = [argument for argument in arguments if not is_of_hydra(argument)]
                _draw_once(composed.hydra.sweeper, of_trials)
        return [*_of_swept_presets(program, arguments, swept, composed)]
    except (HydraException, OmegaConfBaseException) as error:
        text = str(error).partition("Config search path")[0]
        cause = first_line(error.__cause__) if error.__cause__ else ""
        return [" ".join(f"{text} {cause}".split())]


def _of_swept_presets(
    program: Program,
    arguments: list[str],
    swept: Mapping[str, Sequence[str]],
    composed: DictConfig,
) -> Iterator[str]:
    """Presets among the values of a sweep that say something of the sweep itself."""
    for group in PRESETS:
        for option in swept.get(group, ()):
            with composed_sweep(program, [*arguments, f"{group}={option}"]) as with_preset:
                pass
            for part in READ_ONCE:
                if with_preset.hydra[part] != composed.hydra[part]:
                    rule = f"sets hydra.{part}, which all trials share"
                    yield f"{group}={option}: {rule}; set that on the command line"


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
