"""From overrides and the presets (conf/) to one Config, with every problem found on the way.

Hydra composes, `bind` converts the values, and each message says which file a value is from. Hydra
is imported where it is needed: workers load a frozen config, and start without Hydra.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from ddp_train.config import metrics
from ddp_train.config.bind import bind
from ddp_train.config.code_checks import package_of
from ddp_train.config.earlier_runs import CONFIG_KEY, EarlierRun
from ddp_train.config.keys import all_keys, list_rule, own_keys
from ddp_train.config.overrides import Overrides
from ddp_train.config.program import PRESETS, Program
from ddp_train.config.values import as_typed, plain
from ddp_train.errors import ConfigError
from ddp_train.options.custom import NAME as CUSTOM
from ddp_train.options.custom import CustomOption, hooks_of, trackers_of
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import SCALARS, SECTIONS, Config
from ddp_train.text import did_you_mean, first_line, shown

SCHEMA = "_schema"
"""Where Hydra finds the defaults of the schema.

`_schema/optimizer/adam` comes before conf/optimizer/adam.yaml.
"""
BY_OVERRIDE = "an option is chosen by `- override /GROUP: OPTION`"
"""A line of the `defaults` of a preset."""


def read_config(
    program: Program, overrides: Overrides, adopted: dict[str, Any] | None = None
) -> tuple[Config, list[str]]:
    """Compose and bind. Returns the config (its defaults where a value was wrong) and all problems.

    adopted: sections and keys that replace the composed ones, unless the command line chose their
    option or gave the key. An evaluation adopts the model, the data and the metrics of its
    checkpoint; all of a file is adopted with `config=FILE`. Code that is adopted must be in
    `trusted_modules`; what the command line and conf/ name is trusted (SECURITY.md).
    """
    from hydra.errors import HydraException

    try:
        values, choices, problems = compose(program, overrides)
        if _choose_own_classes(overrides, values, choices):
            values, choices, problems = compose(program, overrides)
    except ConfigError as error:
        return Config(), [*overrides.problems, *error.problems]
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        return Config(), [*overrides.problems, _Refusal(program, overrides, error).message()]
    of_files = [
        *_problems_of_files(program, choices),
        *_replaced_classes(program, overrides, values),
    ]
    if of_files:
        return Config(), [*overrides.problems, *of_files]
    ground, problems_of_ground = _ground_of(overrides)
    problems += problems_of_ground
    named = {**overrides.choices, **overrides.given}
    from_elsewhere = {
        section: content
        for section, content in {**ground, **(adopted or {})}.items()
        if section not in named
    }
    _adopt(values, from_elsewhere, overrides)
    _keep_one_warm_up(values, overrides)
    config, unbound = bind(values)
    trusted = [*config.trusted_modules, *_own_packages(config, from_elsewhere.keys())]
    config.trusted_modules = list(dict.fromkeys(trusted))
    problems += _located(program, overrides, choices, unbound)
    return config, overrides.problems + problems


def compose(
    program: Program, overrides: Overrides
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """The composed configuration as plain data, the option of each group, and all problems.

    Raises HydraException, OmegaConfBaseException, YAMLError or ValueError where a file under conf/
    cannot be composed, ConfigError where a variable of the environment is missing.
    """
    arguments = [text for text in overrides.arguments if not text.startswith("++")]
    composed, choices = compose_options(program, arguments)
    set_values = [_set_value(composed, key, value) for key, value in overrides.given.items()]
    return plain(composed), choices, [problem for problem in set_values if problem]


def search_path_of(program: Program) -> list[str]:
    """The override by which Hydra finds the user's presets, if there are any."""
    if not program.own:
        return []
    # After ours, which nothing there can replace: `Program.problem_of`.
    folder = str(program.own.absolute()).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.searchpath=['file://{folder}']"]


def compose_options(program: Program, arguments: list[str]) -> tuple[DictConfig, dict[str, str]]:
    """Have Hydra compose the choices of options. Returns the config, and each group's option."""
    import hydra

    register_schema(program)
    arguments = [*arguments, *search_path_of(program)]
    with hydra.initialize_config_dir(str(program.presets), version_base="1.3"):
        composed = hydra.compose("config", arguments, return_hydra_config=True)
    choices = {str(group): str(option) for group, option in composed.hydra.runtime.choices.items()}
    OmegaConf.set_struct(composed, False)
    del composed["hydra"]
    return composed, choices


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
        return f"{found}: the list has no such item; give it whole"
    except (OmegaConfBaseException, ValueError) as error:
        return f"{found}: {first_line(error)}"
    return ""


def register_schema(program: Program) -> None:
    """Give Hydra the default of every key, so that a preset holds only what it changes.

    conf/config.yaml merges `_schema/GROUP/OPTION` before conf/GROUP/OPTION.yaml. An option that the
    schema does not know (model=resnet50) has the defaults of the option that its `name` says.
    """
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    defaults = Config()
    keys = {name: getattr(defaults, name) for name in SCALARS}
    sections = {name: dataclasses.asdict(schema()) for name, schema in SECTIONS.items()}
    store.store(name=SCHEMA, node=keys | sections)
    for group, schemas in OPTIONS.items():
        for path in program.files(group):
            schema = schemas.get(_schema_name(group, path))
            if schema is not None:
                node = _node_of(schema)
                store.store(group=f"{SCHEMA}/{group}", name=path.stem, node=node)


def _node_of(schema: type) -> dict[str, Any]:
    """The defaults of an option as a preset would write them."""
    node = dataclasses.asdict(schema())
    if not issubclass(schema, CustomOption):
        return node
    return {"name": CUSTOM, "_target_": None, **{name: node[name] for name in own_keys(schema)}}


def _schema_name(group: str, path: Path) -> str:
    """The option whose defaults a file changes: of its own name, or by its `name` or `_target_`."""
    if path.stem in OPTIONS[group]:
        return path.stem
    content = _content_of(path)
    return str(content.get("name", CUSTOM if "_target_" in content else ""))


def _content_of(path: Path) -> dict[str, Any]:
    """The keys and values of a file; none if it cannot be read, which Hydra reports."""
    with contextlib.suppress(yaml.YAMLError, ValueError, OSError):
        content = yaml.safe_load(path.read_text())
        if isinstance(content, dict):
            return content
    return {}


def _choose_own_classes(
    overrides: Overrides, values: dict[str, Any], choices: dict[str, str]
) -> bool:
    """Choose `custom` where a preset names a class in place of the default option.

    Returns whether there is one, so that the config has to be composed again.
    """
    chosen = False
    defaults = Config()
    for section, options in OPTIONS.items():
        content = values.get(section)
        if CUSTOM not in options or not isinstance(content, dict) or not content.get("_target_"):
            continue
        is_default = choices.get(section) == getattr(defaults, section).name
        if is_default and section not in overrides.choices:
            overrides.choose_own_class(section)
            chosen = True
    return chosen


def _problems_of_files(program: Program, choices: dict[str, str]) -> Iterator[str]:
    """Problems of chosen files of the user's own that Hydra has composed all the same."""
    for group, option in choices.items():
        problem = program.problem_of(group, option)
        if problem:
            yield problem


def _replaced_classes(
    program: Program, overrides: Overrides, values: dict[str, Any]
) -> Iterator[str]:
    """Classes of presets that replace those of options that the command line chose.

    Hydra merges a preset, and what it includes, over the options. Another composition, of options
    without a class, shows what is named there. A preset that names a class beside a built-in option
    is reported by `bind`.
    """
    has_preset = any(overrides.choices.get(group, "None") != "None" for group in PRESETS)
    sections = [
        section
        for section, content in values.items()
        if section in OPTIONS
        and overrides.choices.get(section, CUSTOM) != CUSTOM
        and isinstance(content, dict)
        and content.get("name") == CUSTOM
    ]
    if not has_preset or not sections:
        return
    choices = [text for text in overrides.arguments if not text.startswith("++")]
    without_class = [f"{section}={CUSTOM}" for section in sections]
    others = [text for text in choices if text.partition("=")[0] not in sections]
    composed, _ = compose_options(program, [*others, *without_class])
    for section in sections:
        target = composed[section].get("_target_")
        if target:
            rule = f"contradicts {section}={overrides.choices[section]}; give one of them"
            origin = _preset_with_class(program, section, target)
            yield f"{section}._target_={target}: {rule}{origin}"


def _preset_with_class(program: Program, section: str, target: str) -> str:
    """The preset that names a class, for a message."""
    for group in PRESETS:
        for path in program.files(group):
            content = _content_of(path).get(section)
            if isinstance(content, dict) and content.get("_target_") == target:
                return f" (in {program.shown(path)})"
    return ""


class _Refusal:
    """A refusal by Hydra or OmegaConf, as a message that names the file to blame."""

    def __init__(self, program: Program, overrides: Overrides, error: Exception) -> None:
        self.program = program
        self.overrides = overrides
        self.error = error

    def message(self) -> str:
        from hydra.errors import MissingConfigException

        error = self.error
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            return self._of_yaml(error, error.problem_mark)
        if isinstance(error, MissingConfigException) and error.missing_cfg_file:
            return self._of_missing_file(str(error.missing_cfg_file))
        text = ": ".join(str(part) for part in (error, error.__cause__) if part and str(part))
        text = re.sub(r"\s+full_key: .*$", "", text, flags=re.DOTALL)
        return self._of_text(" ".join(text.split()))

    def _of_yaml(self, error: yaml.MarkedYAMLError, mark: yaml.Mark) -> str:
        """A file that is not YAML, or has a key twice."""
        place = f"{self.program.shown(Path(mark.name))}: line {mark.line + 1}"
        key = str(error.problem).removeprefix("found duplicate key ")
        if key != error.problem:
            return f"{place}: {key} stands there twice; keep one of them"
        return f"{place}: cannot be read: {error.problem}"

    def _of_missing_file(self, missing: str) -> str:
        """An option, or a file, that the `defaults` of a preset name."""
        group, _, name = missing.removeprefix(f"{SCHEMA}/").rpartition("/")
        options = self.program.options(group)
        path = self.program.file(group, name)
        if path and group in OPTIONS:  # its own `name` is missing, or unknown
            known = list(OPTIONS[group])
            code = ", or `_target_: package.Name`" if CUSTOM in known else ""
            rule = f"names none of {', '.join(known)}; add `name: {known[0]}`{code}"
            return f"{self.program.shown(path)}: {rule}"
        unused = self.program.unused().get((group, name))
        if unused:
            return unused
        if options:
            rule = f"must be one of {', '.join(options)}{did_you_mean(name, options)}"
        else:
            rule = f"no such file; {BY_OVERRIDE}"
        return f"{self._blamed(name)}defaults: {group}: {name}: {rule}"

    def _of_text(self, text: str) -> str:
        """Hydra's own text, which names a file as `In 'experiment/mine': ...` at most."""
        cause = self.error.__cause__
        is_reference = isinstance(cause, GrammarParseError)
        key = cause.full_key if is_reference else getattr(self.error, "full_key", None)
        source = re.match(r"In '([^']+)/([^'/]+)': ", text)
        path = self.program.file(source[1], source[2]) if source else None
        if path and "Cannot merge" in text:
            return _wrong_kind(path, text) + f" (in {self.program.shown(path)})"
        if "defaults" in text or "Multiple values" in text:
            quoted = re.search(r"'(\w+)'", text)
            guess = did_you_mean(quoted[1], self.program.groups()) if quoted else ""
            return f"{self._blamed('defaults')}{text}{guess}; {BY_OVERRIDE}"
        origin = ""
        if is_reference and key:
            remedy = "use a reference like ${train.epochs} or ${oc.env:NAME}, or no $"
            origin = (
                f"; {remedy}{_origin(self.program, self.overrides, self.overrides.choices, key)}"
            )
        return f"{key}: {text}{origin}" if key else f"{text}{origin}"

    def _blamed(self, text: str) -> str:
        """The first of the chosen presets in which a text stands, as the beginning of a message."""
        for group in PRESETS:
            path = self.program.file(group, self.overrides.choices.get(group))
            if path and text in path.read_text(errors="replace"):
                return f"{self.program.shown(path)}: "
        return ""


def _wrong_kind(path: Path, text: str) -> str:
    """The rule that a file breaks whose content Hydra cannot merge; "" if there is none.

    A list cannot be merged with keys and values.
    """
    content = _content_of(path)
    if not content:
        return "must hold keys and values, KEY: VALUE"
    group = path.parent.name
    sections = content if group in PRESETS else {group: content}
    for section, values in sections.items():
        is_section = section in OPTIONS or section in SECTIONS
        if is_section and isinstance(values, list):
            return f"{section}={shown(values)}: is a section; it holds keys and values, KEY: VALUE"
        by_key = {section: values}
        if is_section and isinstance(values, dict):
            by_key = {f"{section}.{name}": value for name, value in values.items()}
        for key, value in by_key.items():
            rule = list_rule(key)
            if rule and isinstance(value, dict):
                return f"{key}={shown(value)}: {rule}"
    return text


def _ground_of(overrides: Overrides) -> tuple[dict[str, Any], list[str]]:
    """What `config=FILE` gives, and what is wrong with it."""
    if overrides.config is None:
        return {}, []
    problems = [
        f"{group}={overrides.choices[group]}: contradicts {CONFIG_KEY}={overrides.config},"
        " which is a whole run; give one of them, and single keys beside it"
        for group in PRESETS
        if overrides.choices.get(group, "None") != "None"
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
            _set(section, values[section], name, value)


def _set(section: str, content: dict[str, Any], name: str, value: Any) -> None:
    """Set a key of an adopted section; of your own class an argument.

    name: dotted, if it is inside a mapping.
    """
    *outer, last = name.split(".")
    first = name.partition(".")[0]
    if content.get("name") == CUSTOM and first not in own_keys(OPTIONS[section][CUSTOM]):
        content = content["arguments"]
    for part in outer:
        content = content.setdefault(part, {})
    content[last] = value


def _keep_one_warm_up(values: dict[str, Any], overrides: Overrides) -> None:
    """Replace the warm-up of a preset, in steps or epochs, by the one that is given."""
    schedule = values.get("schedule")
    if not isinstance(schedule, dict):
        return
    has_steps = "schedule.warmup_steps" in overrides.given
    has_epochs = "schedule.warmup_epochs" in overrides.given
    if has_steps and not has_epochs:
        schedule["warmup_epochs"] = None
    if has_epochs and not has_steps:
        schedule["warmup_steps"] = 0


def _own_packages(config: Config, from_elsewhere: Collection[str]) -> list[str]:
    """Packages of the code that the command line or conf/ names."""
    paths = []
    for group in OPTIONS:
        option = getattr(config, group)
        if group not in from_elsewhere and isinstance(option, CustomOption):
            paths += [path for _, path in option.paths()]
    if "metrics" not in from_elsewhere:
        paths += [metric.code.target for metric in metrics.further(config)]
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
            origin = _origin(program, overrides, choices, problem.split("=")[0])
            located.append(as_typed(problem, overrides.given) + origin)
    return located


def _origin(program: Program, overrides: Overrides, choices: dict[str, str], dotted: str) -> str:
    """The file under conf/ that gave a key its value, where the command line did not."""
    is_given = any(f"{key}.".startswith(f"{dotted}.") for key in overrides.given)
    if dotted in overrides.choices or is_given:
        return ""
    section, _, name = dotted.rpartition(".")
    of_runs = [program.file(group, choices.get(group)) for group in reversed(PRESETS)]
    candidates = [(path, section) for path in (*of_runs, program.presets / "config.yaml")]
    candidates.append((program.file(section, choices.get(section)), ""))
    for path, inside in candidates:
        content = _content_of(path) if path else {}
        if inside:
            content = content.get(inside)
        if path and isinstance(content, dict) and name in map(str, content):
            return f" (in {program.shown(path)})"
    return ""
