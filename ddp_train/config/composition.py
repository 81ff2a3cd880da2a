"""Composes one Config from overrides and presets (conf/), with every problem found on the way.

Hydra composes, `bind` converts the values, and each message says which file a value is from.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_train.config import metrics, preset_checks
from ddp_train.config.bind import bind
from ddp_train.config.code_checks import package_of
from ddp_train.config.earlier_runs import CONFIG_KEY, EarlierRun
from ddp_train.config.hydra_errors import HydraErrors, composition_errors
from ddp_train.config.hydra_keys import problems_of_presets
from ddp_train.config.keys import all_keys, list_rule, own_keys
from ddp_train.config.overrides import Overrides
from ddp_train.config.presets import compose_options, origin_of
from ddp_train.config.program import Program
from ddp_train.config.values import as_typed, plain_values
from ddp_train.errors import ConfigError
from ddp_train.options.custom import NAME as CUSTOM
from ddp_train.options.custom import CustomOption, hooks_of, trackers_of
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import Config
from ddp_train.text import first_line, shown

IN_PLACE_OF = (
    ("schedule.warmup_steps", "schedule.warmup_epochs", None),
    ("schedule.warmup_epochs", "schedule.warmup_steps", 0),
    ("train.evaluate_every_steps", "train.evaluate_every_epochs", None),
    ("train.evaluate_every_epochs", "train.evaluate_every_steps", None),
)
"""Keys each of which replaces another one, with the value of that where it is not given."""


@dataclass(frozen=True)
class Composition:
    """The configuration that Hydra has composed, with the values of the command line."""

    values: dict[str, Any]
    """Plain data."""
    choices: dict[str, str]
    """The option of each group."""
    problems: list[str]


def read_config(
    program: Program, overrides: Overrides, adopted: dict[str, Any] | None = None
) -> tuple[Config, list[str]]:
    """Compose and bind. Returns the config (its defaults where a value was wrong) and all problems.

    adopted: sections and keys that replace the composed ones, unless the command line chose their
    option or gave the key. An evaluation adopts the model, the data and the metrics of its
    checkpoint; all of a file is adopted with `config=FILE`. Code that is adopted must be in
    `trusted_modules`; what the command line and conf/ name is trusted (SECURITY.md).
    """
    try:
        composition = _composition_of(program, overrides)
    except ConfigError as error:
        return Config(), [*overrides.problems, *error.problems]
    values = composition.values
    of_presets = list(preset_checks.problems(program, overrides, values, composition.choices))
    if of_presets:
        return Config(), [*overrides.problems, *of_presets]
    ground, problems_of_ground = _ground_of(overrides)
    from_elsewhere = {**ground, **(adopted or {})}
    for section in (*overrides.choices, *overrides.given):
        from_elsewhere.pop(section, None)
    _adopt(values, from_elsewhere, overrides)
    _keep_the_given(values, overrides)
    config, unbound = bind(values)
    trusted = [*config.trusted_modules, *_own_packages(config, from_elsewhere)]
    config.trusted_modules = list(dict.fromkeys(trusted))
    located = _located(program, overrides, composition.choices, unbound)
    return config, [
        *overrides.problems,
        *composition.problems,
        *problems_of_ground,
        *located,
    ]


def _composition_of(program: Program, overrides: Overrides) -> Composition:
    """Compose the options, again if a preset names a class of the user's in place of one.

    Raises ConfigError for what cannot be composed.
    """
    try:
        composition = _compose(program, overrides)
        if _choose_own_classes(overrides, composition):
            composition = _compose(program, overrides)
    except composition_errors() as error:
        raise ConfigError([HydraErrors(program, overrides).message(error)]) from error
    return composition


def _compose(program: Program, overrides: Overrides) -> Composition:
    """Have Hydra compose the options, and set the values that were given.

    Raises HydraException, OmegaConfBaseException, YAMLError or ValueError where a file under conf/
    cannot be composed, ConfigError where a variable of the environment is missing.
    """
    composed, choices = compose_options(program, overrides.choice_arguments)
    problems = [_set_value(composed, key, value) for key, value in overrides.given.items()]
    for key, problem in problems_of_presets(composed.pop("hydra"), overrides.is_of_trial):
        problems.append(f"{problem}{origin_of(key, program, overrides, choices)}")
    return Composition(plain_values(composed), choices, list(filter(None, problems)))


def _set_value(composed: DictConfig, key: str, value: Any) -> str:
    """Set a key as Hydra does. Returns what is wrong with it, "" if nothing."""
    found = f"{key}={shown(value)}"
    below = next((name for name in all_keys() if name.startswith(f"{key}.")), None)
    if below and not isinstance(value, dict):  # another override would make a section of it again
        return f"{found}: is a section; set one of its keys, {below}=..."
    parent, _, name = key.rpartition(".")
    try:
        if parent and OmegaConf.is_list(OmegaConf.select(composed, parent)) and not name.isdigit():
            return f"{found}: {parent} {list_rule(parent)}"
        is_list = OmegaConf.is_list(OmegaConf.select(composed, key))
        merge = not (is_list and isinstance(value, dict))  # else `bind` reports it
        OmegaConf.update(composed, key, value, merge=merge, force_add=True)
    except IndexError:
        return f"{found}: the list has no item of this number; give the whole list"
    except (OmegaConfBaseException, ValueError) as error:
        return f"{found}: {first_line(error)}"
    return ""


def _choose_own_classes(overrides: Overrides, composition: Composition) -> bool:
    """Choose `custom` where a preset names a class in place of the default option.

    Returns whether there is one, so that the config has to be composed again.
    """
    defaults = Config()
    sections = []
    for section, options in OPTIONS.items():
        content = composition.values.get(section)
        names_class = isinstance(content, dict) and bool(content.get("_target_"))
        is_default = composition.choices.get(section) == getattr(defaults, section).name
        is_typed = section in overrides.choices
        if CUSTOM in options and names_class and is_default and not is_typed:
            sections.append(section)
    for section in sections:
        overrides.choose_own_class(section)
    return bool(sections)


def _ground_of(overrides: Overrides) -> tuple[dict[str, Any], list[str]]:
    """The content of `config=FILE`, and what is wrong with it."""
    if overrides.config is None:
        return {}, []
    problems = [
        f"{group}={option}: contradicts {CONFIG_KEY}={overrides.config}, which is a whole config;"
        " give one of them, and change single keys by overrides"
        for group, option in overrides.presets.items()
    ]
    try:
        return EarlierRun.of_file(overrides.config).ground(), problems
    except ConfigError as error:
        return {}, [*error.problems, *problems]


def _adopt(values: dict[str, Any], from_elsewhere: dict[str, Any], overrides: Overrides) -> None:
    """Put sections of an earlier run in place of the composed ones, with keys that are given."""
    for section, content in from_elsewhere.items():
        values[section] = copy.deepcopy(content)
    for dotted, value in overrides.given.items():
        section, _, name = dotted.partition(".")
        if name and section in from_elsewhere and isinstance(values[section], dict):
            _set_adopted(section, values[section], name, value)


def _set_adopted(section: str, content: dict[str, Any], name: str, value: Any) -> None:
    """Set a key of an adopted section; of the user's class an argument.

    name: dotted, if it is inside a mapping.
    """
    parts = name.split(".")
    if content.get("name") == CUSTOM and parts[0] not in own_keys(OPTIONS[section][CUSTOM]):
        content = content["arguments"]
    for part in parts[:-1]:
        content = content.setdefault(part, {})
    content[parts[-1]] = value


def _keep_the_given(values: dict[str, Any], overrides: Overrides) -> None:
    """Replace a number of a preset, in steps or epochs, by the one that is given."""
    for given, other, absent in IN_PLACE_OF:
        section, _, name = other.partition(".")
        content = values.get(section)
        is_replaced = given in overrides.given and other not in overrides.given
        if is_replaced and isinstance(content, dict):
            content[name] = absent


def _own_packages(config: Config, from_elsewhere: Collection[str]) -> list[str]:
    """The packages of the code that the command line or conf/ names."""
    paths = []
    for group in OPTIONS:
        option = getattr(config, group)
        if group not in from_elsewhere and isinstance(option, CustomOption):
            paths += [path for _, path in option.paths()]
    if "data" not in from_elsewhere:
        samplers = config.data.samplers().values()
        paths += [str(given.get("_target_", "")) for given in samplers]
    if "metrics" not in from_elsewhere:
        paths += [metric.code.target for metric in metrics.further_metrics(config)]
    if "hooks" not in from_elsewhere:
        paths += [hook.target for hook in hooks_of(config.hooks).values()]
    if "tracker" not in from_elsewhere:
        paths += [tracker.target for tracker in trackers_of(config.tracker.classes).values()]
    return [package for path in paths for package in package_of(path)]


def _located(
    program: Program, overrides: Overrides, choices: dict[str, str], problems: list[str]
) -> list[str]:
    """The problems of binding that are new, each as it was typed or with the file it is from."""
    reported = {problem.split(":")[0] for problem in overrides.problems}
    located = []
    for problem in problems:
        if problem.split(":")[0] not in reported:
            key = problem.split("=")[0]
            origin = origin_of(key, program, overrides, choices)
            located.append(as_typed(problem, overrides.given) + origin)
    return located
