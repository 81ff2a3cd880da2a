"""From command-line words and the files in conf/ to one Config, with every problem found on the way.

Hydra composes; OmegaConf converts the types. Both stop at their first complaint, so values are forced past Hydra
(`++key=value`) and bound to the schema one by one here: a user sees all mistakes at once. Hydra is imported where it is
needed: workers bind what was composed, and start without it.
"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from ddp_train.config.bind import bind
from ddp_train.config.schema import OPTIONS, Config
from ddp_train.config.values import from_environment, leaves
from ddp_train.errors import ConfigError
from ddp_train.text import did_you_mean, shown

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

MAY_BE_NULL = ("experiment", "debug")
MAY_BE_SEVERAL = ("tracker",)
STUDY = "study"
"""A mode and its files, which are no part of a run's config."""


@dataclasses.dataclass
class Overrides:
    """The words of a command line, made ready for Hydra, and what is wrong with them."""

    words: list[str]
    given: dict[str, Any]
    """Value overrides: the dotted key and the value that was given."""
    choices: dict[str, str]
    """Group overrides: the group and the option that was chosen."""
    problems: list[str]
    swept: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Sweeps: the key or group and its values as typed; none for an interval, which a sweeper draws from."""


def read_overrides(conf: Path, words: list[str], sweep: bool = False) -> Overrides:
    """Checks the words of a command line (those without a dash) one by one; several values only in a `sweep`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    read = Overrides([], {}, {}, [])
    for word in words:
        try:
            override = OverridesParser.create().parse_override(word)
            if not override.key_or_group:
                raise HydraException
        except HydraException:
            read.problems.append(f"{word}: not of the form key=value" + ("" if "=" in word else ", '=' is missing"))
            continue
        _read_override(conf, override, sweep, read)
    for section in OPTIONS:
        target = f"{section}._target_"
        if target not in read.given or "custom" not in OPTIONS[section]:
            continue
        chosen = read.choices.setdefault(section, "custom")
        if chosen != "custom":
            read.problems.append(
                f"{target}={shown(read.given[target])}: contradicts {section}={chosen}; give one of them"
            )
        if f"{section}=custom" not in read.words:
            read.words.insert(0, f"{section}=custom")
    return read


def _read_override(conf: Path, override: Override, sweep: bool, read: Overrides) -> None:
    word, name = override.input_line or "", override.key_or_group
    if name.split(".")[0].split("/")[0] == "hydra":
        foreign = [text for key, text in leaves(override.value(), name) if _names_code(key) and _is_foreign(text)]
        if foreign:
            read.problems.append(f"{word}: loads code from outside hydra: {foreign[0]}")
        elif not sweep:
            read.problems.append(f"{word}: Hydra's own keys act on sweeps only; add -m, or leave it out")
        else:
            read.words.append(word)
    elif override.is_delete():
        read.problems.append(f"{word}: no key can be removed; leave it out for its default")
    elif override.is_sweep_override():
        countable = override.is_choice_sweep() or override.is_range_sweep()
        read.swept[name] = list(override.sweep_string_iterator()) if countable else []
        if sweep:
            read.words.append(word)
        else:
            read.problems.append(f"{word}: several values; add -m to sweep over them, or quote them: {name}='...'")
    elif name.split(".")[0] == STUDY:
        read.problems.append(f"{word}: belongs to mode={STUDY}; add that, or leave it out")
    elif (conf / name).is_dir():
        options, option = sorted(path.stem for path in (conf / name).glob("*.yaml")), override.value()
        chosen = option if isinstance(option, list) and name in MAY_BE_SEVERAL else [option]
        wrong = [one for one in chosen if str(one) not in options]
        if not wrong or (option is None and name in MAY_BE_NULL):
            read.words.append(word)
            read.choices[name] = str(option)
        else:
            own = "." in str(wrong[0]) and (conf / name / "custom.yaml").exists()
            guess = f"; your own: {name}._target_={wrong[0]}" if own else did_you_mean(str(wrong[0]), options)
            read.problems.append(f"{name}={shown(option)}: must be one of {', '.join(options)}{guess}")
    elif name.endswith(".name") and (conf / name[:-5]).is_dir():
        read.problems.append(f"{word}: an option is chosen by {name[:-5]}={shown(override.value())}")
    else:
        read.given[name] = override.value()
        read.words.append("++" + word.lstrip("+"))


def _names_code(dotted: str) -> bool:
    """Whether Hydra, or Python's logging for it, would import what stands under a key."""
    return dotted.rpartition(".")[2] in ("_target_", "()", "class")


def _is_foreign(path: Any) -> bool:
    return not str(path).startswith(("hydra.", "hydra_plugins.", "logging."))


def compose(conf: Path, overrides: Overrides) -> dict[str, Any]:
    """The composed configuration as plain data.

    Raises HydraException or OmegaConfBaseException where a file under conf/ cannot be composed, ConfigError where a
    variable of the environment is missing.
    """
    import hydra

    with hydra.initialize_config_dir(str(conf), version_base="1.3"):
        composed = hydra.compose("config", overrides.words)
    return plain(composed)


def plain(composed: DictConfig) -> dict[str, Any]:
    """The composed configuration as plain data, references resolved.

    `${oc.env:NAME}` stays as it is in the arguments of anyone's own code, whatever refers to it: the value may be a
    secret, and this goes into files. It is looked up where the argument is used.
    """

    def kept(name: str, *default: str) -> str:
        return "${oc.env:" + ",".join([name, *map(str, default)]) + "}"

    OmegaConf.register_new_resolver("oc.env", kept, replace=True)
    try:
        values = typing.cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True))
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    for section, content in values.items():
        found = from_environment(content, section)  # raises for a variable that is not set, before any worker starts
        if not (isinstance(content, dict) and content.get("_target_")):
            values[section] = found
    return values


def read_config(conf: Path, overrides: Overrides, adopted: dict[str, Any] | None = None) -> tuple[Config, list[str]]:
    """Composes and binds. Returns the config (its defaults where a value was wrong) and all problems.

    `adopted` holds sections that replace the composed ones, unless the command line chose their option: an evaluation
    adopts the model and the data of its checkpoint.
    """
    from hydra.errors import HydraException

    try:
        values = compose(conf, overrides)
    except ConfigError as error:
        return Config(), [*overrides.problems, *error.problems]
    except (HydraException, OmegaConfBaseException) as error:
        message = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        where = f"{key}: " if (key := getattr(error, "full_key", None)) else ""
        return Config(), [*overrides.problems, where + " ".join(message.split())]
    for section, content in (adopted or {}).items():
        if section not in overrides.choices:
            values[section] = content
    for dotted, value in overrides.given.items() if adopted else ():
        section, _, name = dotted.partition(".")
        if name and section in (adopted or {}):
            values[section][name] = value
    config, problems = bind(values)
    located = [problem + _origin(conf, overrides, problem.split("=")[0]) for problem in problems]
    return config, overrides.problems + located


def _origin(conf: Path, overrides: Overrides, dotted: str) -> str:
    """The file under conf/ that gave a key its value, where the command line did not."""
    if dotted in overrides.choices or any(f"{key}.".startswith(f"{dotted}.") for key in overrides.given):
        return ""
    section, _, name = dotted.rpartition(".")
    presets = [conf / group / f"{overrides.choices.get(group)}.yaml" for group in MAY_BE_NULL]
    contents = {
        path: yaml.safe_load(path.read_text()) or {} for path in (*presets, conf / "config.yaml") if path.is_file()
    }
    options: dict[str, str] = {}
    for content in reversed(contents.values()):  # a preset chooses other options than config.yaml
        choices = (entry for entry in content.get("defaults", []) if isinstance(entry, dict))
        options |= {group.removeprefix("override /"): option for entry in choices for group, option in entry.items()}
    option = conf / section / f"{overrides.choices.get(section) or options.get(section)}.yaml"
    for path, content in reversed(contents.items()):
        inside = content.get(section) if section else content
        if isinstance(inside, dict) and name in inside:
            return f" (in {path.relative_to(conf.parent)})"
    return f" (in {option.relative_to(conf.parent)})" if section in options and option.is_file() else ""
