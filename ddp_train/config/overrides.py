"""From the overrides of a command line and the presets (conf/) to one Config, with every problem
found on the way.

Hydra composes; OmegaConf converts the types. Both stop at the first error, so values are passed to
Hydra as `++key=value` and bound to the schema one by one here: a user sees all mistakes at once.
Hydra is imported where it is needed: workers load a frozen config, and start without Hydra.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_train.config import earlier_runs, metrics
from ddp_train.config.bind import all_keys, bind, no_list, own_keys
from ddp_train.config.code_checks import package_of
from ddp_train.config.earlier_runs import EarlierRun
from ddp_train.config.presets import chosen_presets, content_of, nameless, schema_name
from ddp_train.config.program import PRESETS, Program
from ddp_train.config.user_code import torch_optimizers
from ddp_train.config.values import (
    as_typed,
    grammatical,
    in_quotes,
    leaves,
    plain,
    quoted,
    unclosed,
)
from ddp_train.errors import ConfigError
from ddp_train.options.custom import NAME as CUSTOM
from ddp_train.options.custom import CustomOption, hooks_of, tracker_key, trackers_of
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import SCALARS, SECTIONS, Config
from ddp_train.text import did_you_mean, shown, snake_case

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

COMMANDS = ["init", "resize"]
"""First words that are no overrides."""
MULTIPLE_CHOICE = ("tracker",)
"""Groups of which several options may be chosen."""
STUDY = "study"
"""A mode and its files, which are not part of a run's config."""
LONGEST = 200
"""Letters of a key, and of a word in a message."""
SCHEMA = "_schema"
"""Where Hydra finds the defaults of the schema: `_schema/optimizer/adam` before
conf/optimizer/adam.yaml."""


@dataclasses.dataclass
class Overrides:
    """The overrides of a command line, prepared for Hydra, and what is wrong with them."""

    arguments: list[str]
    """For Hydra."""
    given: dict[str, Any]
    """Value overrides: the dotted key and the value that was given."""
    choices: dict[str, str]
    """Group overrides: the group and the option that was chosen."""
    problems: list[str]
    config: Path | None = None
    """`config=FILE`: the config of an earlier run, which the other words change."""
    swept: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Sweeps: the key or group and its values as typed; none for an interval, which a sweeper draws
    from."""


def read_overrides(program: Program, arguments: list[str], sweep: bool = False) -> Overrides:
    """Checks overrides (arguments without a dash) one by one; several values are allowed only in a
    `sweep`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    read = Overrides([], {}, {}, [])
    for argument in arguments:
        try:
            override = OverridesParser.create().parse_override(quoted(argument))
            if not override.key_or_group:
                raise HydraException
        except (
            HydraException,
            RecursionError,
            ValueError,
        ):  # ValueError: Python reads no integers of 4,300 digits
            if remedy := in_quotes(argument):
                read.problems.append(f"{argument}: {remedy}")
                continue
            problem = f"{shortened(argument)}: not of the form key=value"
            guess = did_you_mean(argument, COMMANDS) if argument == arguments[0] else ""
            read.problems.append(
                problem + (unclosed(argument) if "=" in argument else f", '=' is missing{guess}")
            )
            continue
        if len(override.key_or_group) > LONGEST:  # Hydra would look for a file of that name
            read.problems.append(f"{shortened(argument)}: no such key")
            continue
        _read_override(program, override, sweep, read)
    _drop_sections(read)
    for section, target, source in _own_classes(program, read):
        if not source:
            chosen = read.choices.setdefault(section, "custom")
        else:
            chosen = read.choices.get(section, "custom")
        if chosen != "custom":
            read.problems.append(
                f"{section}._target_={shown(target)}{source}: contradicts {section}={chosen}; give"
                " one of them"
            )
        if f"{section}=custom" not in read.arguments:
            read.arguments.insert(0, f"{section}=custom")
    return read


def _drop_sections(read: Overrides) -> None:
    """Takes out values of sections, with a problem for each: another word would make a section of
    it again, unseen. And keys of what is a list, which Hydra cannot merge with it."""
    for name, value in read.given.items():
        if problem := no_list(name, value):
            read.problems.append(problem)
            read.arguments = [word for word in read.arguments if not word.startswith(f"++{name}=")]
            continue
        others = (
            *read.given,
            *read.swept,
            *(all_keys() if isinstance(value, list) else ()),
        )  # Hydra merges no list
        below = next((key for key in others if key.startswith(f"{name}.")), None)
        if below and not isinstance(value, dict) and not no_list(below, None):
            read.problems.append(
                f"{name}={shown(value)}: is a section; set one of its keys, {below}=..."
            )
            read.arguments = [word for word in read.arguments if not word.startswith(f"++{name}=")]


def shortened(text: str) -> str:
    """For a message: a word may be as long as a file."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... ({len(text):,} characters)"


def _own_classes(program: Program, read: Overrides) -> Iterator[tuple[str, Any, str]]:
    """The sections for which the command line or a preset names a class: the section, the class,
    and the preset."""
    of_presets = {}
    problems = list[str]()
    chosen_options = [
        *((group, read.choices.get(group)) for group in PRESETS),
        *read.choices.items(),
    ]
    for group, path, content in chosen_presets(program, chosen_options, problems):
        if group not in PRESETS:
            continue
        chosen = {
            key for line in content.get("defaults") or [] if isinstance(line, dict) for key in line
        }
        for section, values in content.items():
            if (
                isinstance(values, dict)
                and values.get("_target_")
                and f"override /{section}" not in chosen
            ):
                of_presets[section] = values["_target_"], f" (in {program.shown(path)})"
    if problems:  # Hydra would stop at the first of them
        raise ConfigError([*read.problems, *problems])
    for section, options in OPTIONS.items():
        target = read.given.get(f"{section}._target_")
        if "custom" in options and (target is not None or section in of_presets):
            yield (section, target, "") if target is not None else (section, *of_presets[section])


def _read_override(program: Program, override: Override, sweep: bool, read: Overrides) -> None:
    from hydra.core.override_parser.types import Glob

    argument = override.input_line or ""
    name = override.key_or_group
    is_group = program.is_group(name)
    if name.split(".")[0].split("/")[0] == "hydra":
        foreign = [
            text
            for key, text in leaves(override.value(), name)
            if _names_code(key) and _is_foreign(text)
        ]
        if foreign:
            read.problems.append(f"{argument}: loads code from outside hydra: {foreign[0]}")
        elif not sweep:
            read.problems.append(
                f"{argument}: Hydra's own keys act on sweeps only; add -m, or leave it out"
            )
        else:
            read.arguments.append(argument)
    elif override.is_delete():
        read.problems.append(f"{argument}: no key can be removed; leave it out for its default")
    elif override.is_sweep_override():
        countable = override.is_choice_sweep() or override.is_range_sweep()
        value = override.value()
        if is_glob := isinstance(value, Glob):
            read.swept[name] = value.filter(program.options(name))
        else:
            read.swept[name] = list(override.sweep_string_iterator()) if countable else []
        if is_glob and not is_group:
            read.problems.append(
                f"{argument}: glob() chooses options of a group, and {name} is none; name the"
                " values"
            )
        elif name == "optimizer" and (
            targets := torch_optimizers(read.swept[name], program.options(name))
        ):
            read.problems.append(
                f"{argument}: sweep over torch's own by {name}._target_={','.join(targets)}"
            )
        elif sweep:
            read.arguments.append(argument if is_group else "++" + argument.lstrip("+"))
        elif name in MULTIPLE_CHOICE:
            several = ",".join(read.swept[name])
            read.problems.append(
                f"{argument}: for several at once, use {name}=[{several}]; for a sweep, add -m"
            )
        else:
            remedy = f"add -m to sweep over them, or quote them: {name}='...'"
            read.problems.append(f"{argument}: several values; {remedy}")
    elif name == earlier_runs.KEY:
        read.config = Path(str(override.value()))
        read.arguments.append("++" + argument.lstrip("+"))  # for the trials of a sweep
    elif name.split(".")[0] == STUDY:
        read.problems.append(f"{argument}: belongs to mode={STUDY}; add that, or leave it out")
    elif is_group and argument.startswith("+"):
        read.problems.append(f"{argument}: {name} has a value already; use {argument.lstrip('+')}")
    elif is_group:
        _read_choice(program, name, override.value(), argument, read)
    elif program.own and "." not in name and (program.own / name).is_dir():
        rule = (
            "a folder of your own is a group only if it has the name of one:"
            f" {', '.join(program.groups())}"
        )
        read.problems.append(f"{argument}: {program.own / name} is no group; {rule}")
    elif name.endswith(".name") and program.is_group(name[:-5]):
        read.problems.append(
            f"{argument}: an option is chosen by its group; use"
            f" {name[:-5]}={shown(override.value())}"
        )
    else:
        read.given[name] = override.value()
        read.arguments.append("++" + argument.lstrip("+"))


def _read_choice(program: Program, group: str, option: Any, argument: str, read: Overrides) -> None:
    """An override that chooses an option of a group."""
    options = program.options(group)
    if group in MULTIPLE_CHOICE and _names_own_tracker(option):
        option = _read_own_trackers(option, read)
        argument = f"{group}={shown(option)}"
    chosen = option if isinstance(option, list) and group in MULTIPLE_CHOICE else [option]
    wrong = [str(one) for one in chosen if str(one) not in options]
    if wrong and (problem := program.unusable().get((group, wrong[0]))):
        read.problems.append(problem)
        return
    if not wrong and (problem := nameless(program, group, str(option))):
        read.problems.append(problem)
        return
    if not wrong or (option is None and group in PRESETS):
        read.arguments.append(argument)
        read.choices[group] = str(option)
        return
    if isinstance(option, dict) and option and "_target_" not in option:
        key, value = next(leaves(option))
        read.problems.append(f"{argument}: set one key: {group}.{key}={shown(value)}")
        return
    same = [one for one in options if one == wrong[0].lower().replace("-", "_")]
    if group == "optimizer" and (targets := torch_optimizers(wrong, options)):
        read.given[f"{group}._target_"] = targets[0]
        read.arguments.append(f"++{group}._target_={targets[0]}")
        return
    if "." in wrong[0] and "custom" in options:
        own = option.get("_target_", wrong[0]) if isinstance(option, dict) else wrong[0]
        guess = f"; for your own class use {group}._target_={own}"
    else:
        if same:
            guess = f"; did you mean {same[0]}?"
        else:
            guess = did_you_mean("" if option is None else wrong[0], options)
    read.problems.append(f"{group}={shown(option)}: must be one of {', '.join(options)}{guess}")


def _names_own_tracker(option: Any) -> bool:
    """Whether `tracker=...` names classes: `[wandb,{_target_: my.Tracker}]` or `my.Tracker`."""
    items = option if isinstance(option, list) else [option]
    return any(_is_class(item) for item in items)


def _is_class(item: Any) -> bool:
    if isinstance(item, dict):
        return "_target_" in item
    return "." in str(item)


def _read_own_trackers(option: Any, read: Overrides) -> list[Any] | str:
    """Set a key of `tracker.classes` for each class of the user. Returns the other trackers."""
    options = []
    names: list[str] = []
    for item in option if isinstance(option, list) else [option]:
        if not _is_class(item):
            options.append(item)
            continue
        values = item if isinstance(item, dict) else {"_target_": item}
        class_name = str(values["_target_"]).rpartition(".")[2]
        name = snake_case(class_name)
        if name in names:
            name = f"{name}_{len(names) + 1}"
        names.append(name)
        key = tracker_key(name)
        read.given[key] = values
        read.arguments.append(f"++{key}={grammatical(values)}")
    return options or "none"


def _names_code(dotted: str) -> bool:
    """Whether Hydra, or Python's logging for it, would import what stands under a key."""
    return dotted.rpartition(".")[2] in ("_target_", "()", "class")


def _is_foreign(path: Any) -> bool:
    return not str(path).startswith(("hydra.", "hydra_plugins.", "logging."))


def register_schema(program: Program) -> None:
    """Tells Hydra the default of every key, so that a preset holds only what it changes.

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
            if schema := schemas.get(schema_name(program, group, path) or ""):
                node = dataclasses.asdict(schema())
                if issubclass(schema, CustomOption):
                    node = {"name": "custom", "_target_": None} | {
                        name: node[name] for name in own_keys(schema)
                    }
                store.store(group=f"{SCHEMA}/{group}", name=path.stem, node=node)


def compose(program: Program, overrides: Overrides) -> tuple[dict[str, Any], dict[str, str]]:
    """The composed configuration as plain data, and the option of each group.

    Raises HydraException or OmegaConfBaseException where a file under conf/ cannot be composed,
    ConfigError where a variable of the environment is missing.
    """
    import hydra

    register_schema(program)
    arguments = overrides.arguments
    if program.own:  # after ours, which nothing there can replace: `Program.check`
        folder = str(program.own.absolute()).replace("\\", "\\\\").replace("'", "\\'")
        arguments = [*arguments, f"hydra.searchpath=['file://{folder}']"]
    with hydra.initialize_config_dir(str(program.presets), version_base="1.3"):
        composed = hydra.compose("config", arguments, return_hydra_config=True)
    choices = {str(group): str(option) for group, option in composed.hydra.runtime.choices.items()}
    OmegaConf.set_struct(composed, False)
    del composed["hydra"]
    return plain(composed), choices


def read_config(
    program: Program, overrides: Overrides, adopted: dict[str, Any] | None = None
) -> tuple[Config, list[str]]:
    """Composes and binds. Returns the config (its defaults where a value was wrong) and all
    problems.

    adopted: sections and keys that replace the composed ones, unless the command line chose their
    option or gave the key. An evaluation adopts the model, the data and the metrics of its
    checkpoint; all of a file is adopted with `config=FILE`. Code that is adopted must be in
    `trusted_modules`; what the command line and conf/ name is trusted (SECURITY.md).
    """
    from hydra.errors import HydraException

    try:
        values, choices = compose(program, overrides)
    except ConfigError as error:
        return Config(), [*overrides.problems, *error.problems]
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        return Config(), [*overrides.problems, *_not_composed(overrides, error)]
    values.pop(earlier_runs.KEY, None)
    ground, problems = _ground_of(overrides)
    named = {**overrides.choices, **overrides.given}
    from_elsewhere = {
        section: content
        for section, content in {**ground, **(adopted or {})}.items()
        if section not in named
    }
    _adopt(values, from_elsewhere, overrides)
    _keep_one_warm_up(values, overrides)
    unusable = program.unusable()
    problems += [unusable[choice] for choice in unusable.keys() & choices.items()]
    config, unbound = bind(values)
    trusted = [*config.trusted_modules, *_own_packages(config, from_elsewhere.keys())]
    config.trusted_modules = list(dict.fromkeys(trusted))
    problems += _located(program, overrides, choices, unbound)
    return config, overrides.problems + problems


def _not_composed(overrides: Overrides, error: Exception) -> list[str]:
    """The messages about what Hydra or OmegaConf refuses."""
    no_lists = [no_list(name, value, of_any=True) for name, value in overrides.given.items()]
    if any(no_lists):
        return [problem for problem in no_lists if problem]
    message = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
    # The `++` before the key, and the places below, were not typed.
    untyped = r"^Error merging override \++|\s+full_key: .*$"
    message = re.sub(untyped, "", message, flags=re.DOTALL)
    message = message.replace("list index out of range", "the list has no such item; give it whole")
    key = getattr(error, "full_key", None)
    where = f"{key}: " if key else ""
    return [where + " ".join(message.split())]


def _ground_of(overrides: Overrides) -> tuple[dict[str, Any], list[str]]:
    """What `config=FILE` gives, and what is wrong with it."""
    if overrides.config is None:
        return {}, []
    problems = [
        f"{group}={overrides.choices[group]}: contradicts {earlier_runs.KEY}={overrides.config},"
        " which is a whole run; give one of them, and single keys beside it"
        for group in PRESETS
        if overrides.choices.get(group, "None") != "None"
    ]
    try:
        return EarlierRun.of_file(overrides.config).ground(), problems
    except ConfigError as error:
        return {}, [*error.problems, *problems]


def _adopt(values: dict[str, Any], from_elsewhere: dict[str, Any], overrides: Overrides) -> None:
    """Puts sections of an earlier run in place of the composed ones, with keys that are given."""
    for section, content in from_elsewhere.items():
        values[section] = copy.deepcopy(content)
    for dotted, value in overrides.given.items():
        section, _, name = dotted.partition(".")
        if name and section in from_elsewhere and isinstance(values[section], dict):
            _set(section, values[section], name, value)


def _keep_one_warm_up(values: dict[str, Any], overrides: Overrides) -> None:
    """Steps or epochs that are given replace those of a preset: they are two names of one thing."""
    schedule = values.get("schedule")
    if not isinstance(schedule, dict):
        return
    has_steps = "schedule.warmup_steps" in overrides.given
    has_epochs = "schedule.warmup_epochs" in overrides.given
    if has_steps and not has_epochs:
        schedule["warmup_epochs"] = None
    if has_epochs and not has_steps:
        schedule["warmup_steps"] = 0


def _set(section: str, content: dict[str, Any], name: str, value: Any) -> None:
    """Sets a key of an adopted section; of your own class an argument.

    name: dotted, if it is inside a mapping.
    """
    *outer, last = name.split(".")
    first = name.partition(".")[0]
    if content.get("name") == CUSTOM and first not in own_keys(OPTIONS[section][CUSTOM]):
        content = content["arguments"]
    for part in outer:
        content = content.setdefault(part, {})
    content[last] = value


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
    if dotted in overrides.choices or any(
        f"{key}.".startswith(f"{dotted}.") for key in overrides.given
    ):
        return ""
    section, _, name = dotted.rpartition(".")
    chosen = [(program.file(group, choices.get(group)), section) for group in reversed(PRESETS)]
    for path, inside in [
        *chosen,
        (program.presets / "config.yaml", section),
        (program.file(section, choices.get(section)), ""),
    ]:
        content = content_of(program, path) if path else {}
        content = content.get(inside, {}) if inside else content
        if path and isinstance(content, dict) and name in content:
            return f" (in {program.shown(path)})"
    return ""
