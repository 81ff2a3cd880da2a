"""The overrides of a command line, checked one by one and prepared for Hydra.

Hydra stops at the first mistake, so it is given the choices of options alone; values are set and
bound to the schema one by one later: a user sees all mistakes at once.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_train.config.earlier_runs import CONFIG_KEY
from ddp_train.config.hydra_keys import problem_of_word
from ddp_train.config.keys import list_rule
from ddp_train.config.program import PRESETS, Program
from ddp_train.config.unreadable import may_be_text, parsed, why_unreadable
from ddp_train.config.user_code import torch_classes
from ddp_train.config.values import in_grammar, leaves
from ddp_train.options.custom import NAME as CUSTOM
from ddp_train.options.custom import tracker_key
from ddp_train.options.registry import OPTIONS
from ddp_train.text import did_you_mean, in_double_quotes, see_page, shown, snake_case

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

SHARDED = ("fsdp", "deepspeed", "zero")
"""Beginnings of the names of strategies that are asked for, and that there are not."""
NOT_REMOVED = "a key cannot be removed; without this argument the key has its default"
MULTIPLE_CHOICE = ("tracker",)
"""Groups of which several options may be chosen."""
STUDY = "study"
"""A mode and its files, which are not part of a run's config."""
LONGEST = 200
"""Letters of a key, and of an argument in a message."""


@dataclass
class Overrides:
    """The overrides of a command line, prepared for Hydra, and what is wrong with them."""

    arguments: list[str]
    """For Hydra, which gets values (`++key=value`) in the trials of a sweep alone."""
    given: dict[str, Any]
    """Value overrides: the dotted key and the value that was given."""
    choices: dict[str, str]
    """Group overrides: the group and the option that was chosen."""
    problems: list[str]
    config: Path | None = None
    """`config=FILE`: the config of an earlier run, which the other overrides change."""
    swept: dict[str, list[str]] = field(default_factory=dict)
    """Sweeps: the key or group and its values as typed; none for an interval, which a sweeper draws
    from."""
    is_of_trial: bool = False
    """Whether these are the overrides of one trial of a sweep."""

    @property
    def presets(self) -> dict[str, str]:
        """The presets of whole runs that were chosen, by their groups."""
        chosen = {group: self.choices.get(group, "None") for group in PRESETS}
        return {group: option for group, option in chosen.items() if option != "None"}

    @property
    def choice_arguments(self) -> list[str]:
        """The arguments that choose options, without those that set values."""
        return [argument for argument in self.arguments if not argument.startswith("++")]

    def set_value(self, key: str, value: Any, typed: str) -> None:
        """Add a value override. typed: the value in Hydra's grammar."""
        self.given[key] = value
        self.arguments.append(f"++{key}={typed}")

    def choose_own_class(self, group: str) -> None:
        """Choose the option of a group that is code of your own."""
        self.choices[group] = CUSTOM
        self.arguments.insert(0, f"{group}={CUSTOM}")


def read_overrides(program: Program, arguments: list[str], sweep: bool = False) -> Overrides:
    """Check overrides (arguments without a dash) one by one.

    sweep: whether several values are allowed.
    """
    reader = _Reader(program, sweep)
    for number, argument in enumerate(arguments):
        reader.read(argument, is_first=number == 0)
    reader.choose_own_classes()
    return reader.overrides


class _Reader:
    """Reader of one override after the other, which it adds to `overrides`."""

    def __init__(self, program: Program, sweep: bool) -> None:
        self.program = program
        self.sweep = sweep
        self.overrides = Overrides([], {}, {}, [])

    def read(self, argument: str, is_first: bool) -> None:
        override = parsed(argument)
        if override is None:
            self._refuse(argument, why_unreadable(self.program, argument, is_first))
            return
        name = override.key_or_group
        if len(name) > LONGEST:  # Hydra would look for a file of that name
            self._refuse(argument, "no such key")
        elif re.split("[./]", name)[0] == "hydra":
            self._read_of_hydra(override)
        elif override.is_delete():
            self._refuse(argument, NOT_REMOVED)
        elif override.is_sweep_override():
            self._read_sweep(override)
        elif name.split(".")[0] == STUDY:
            self._refuse(
                argument, f"acts only with mode={STUDY}; add mode={STUDY}, or leave the key out"
            )
        elif self.program.is_group(name):
            self._read_group(override)
        else:
            self._read_key(override)

    def _refuse(self, argument: str, rule: str) -> None:
        self.overrides.problems.append(f"{shorten(argument)}: {rule}")

    def _read_group(self, override: Override) -> None:
        argument = override.input_line or ""
        if argument.startswith("+"):
            name = override.key_or_group
            self._refuse(argument, f"{name} has a value already; use {argument.lstrip('+')}")
        else:
            self._read_choice(override)

    def _read_key(self, override: Override) -> None:
        argument = override.input_line or ""
        name = override.key_or_group
        section, _, last = name.rpartition(".")
        if name == CONFIG_KEY:
            self.overrides.config = Path(str(override.value()))
            self._pass_on(argument)  # for the trials of a sweep
        elif self.program.own and "." not in name and (self.program.own / name).is_dir():
            groups = ", ".join(self.program.groups())
            rule = f"rename the folder to one of {groups}"
            self._refuse(argument, f"{self.program.own / name} is not a group; {rule}")
        elif last == "name" and section and self.program.is_group(section):
            option = shown(override.value())
            self._refuse(argument, f"is not how an option is chosen; use {section}={option}")
        else:
            self.overrides.given[name] = override.value()
            self._pass_on(argument)

    def _pass_on(self, argument: str) -> None:
        """Let Hydra set a key, whether it has it or not."""
        self.overrides.arguments.append("++" + argument.lstrip("+"))

    def _read_of_hydra(self, override: Override) -> None:
        argument = override.input_line or ""
        if override.is_delete():
            self._refuse(argument, NOT_REMOVED)
            return
        items = leaves(override.value(), override.key_or_group)
        foreign = [path for key, path in items if _names_code(key) and _is_foreign(path)]
        moved = None
        if not override.is_sweep_override():  # which Hydra refuses
            moved = problem_of_word(override.key_or_group, override.value())
        if foreign:
            self._refuse(
                argument,
                f"{foreign[0]} is code from outside hydra; use a class of hydra or hydra_plugins",
            )
        elif moved:
            self.overrides.problems.append(str(moved))
        elif not self.sweep:
            self._refuse(
                argument, "Hydra's own keys act on sweeps only; add -m, or leave the key out"
            )
        else:
            self.overrides.arguments.append(argument)

    def _read_sweep(self, override: Override) -> None:
        """Read an override with several values."""
        from hydra.core.override_parser.types import Glob

        argument = override.input_line or ""
        name = override.key_or_group
        is_group = self.program.is_group(name)
        options = self.program.options(name)
        value = override.value()
        values: list[str] = []
        if isinstance(value, Glob):
            values = value.filter(options)
        elif override.is_choice_sweep() or override.is_range_sweep():
            values = list(override.sweep_string_iterator())
        self.overrides.swept[name] = values
        targets = torch_classes(name, values, options)
        if isinstance(value, Glob) and not is_group:
            rule = (
                f"glob() works only for groups of options, and {name} is not a group; list the"
                " values"
            )
            self._refuse(argument, rule)
        elif targets:
            remedy = f"{name}._target_={','.join(targets)}"
            self._refuse(argument, f"to sweep over classes of torch, use {remedy}")
        elif self.sweep and is_group:
            self.overrides.arguments.append(argument)
        elif self.sweep:
            self._pass_on(argument)
        elif name in MULTIPLE_CHOICE:
            remedy = f"use '{name}=[{','.join(values)}]'; for a sweep, add -m"
            self._refuse(argument, f"for several trackers in one run, {remedy}")
        else:
            self._refuse(argument, f"several values; add -m to sweep over them{_as_one(argument)}")

    def _read_choice(self, override: Override) -> None:
        """Read the choice of an option of a group."""
        group = override.key_or_group
        option = override.value()
        argument = override.input_line or ""
        items = [option]
        if group in MULTIPLE_CHOICE:
            items = _as_list(option)
            if any(_is_class(item) for item in items):
                option = self._read_own_trackers(items)
                items = _as_list(option)
                argument = f"{group}={shown(option)}"
        options = self.program.options(group)
        unknown = [str(item) for item in items if str(item) not in options]
        if option is None and group in PRESETS:  # Hydra takes no null there
            arguments = self.overrides.arguments
            arguments[:] = [text for text in arguments if text.partition("=")[0] != group]
            self.overrides.choices[group] = str(option)
            return
        if not unknown:
            self.overrides.arguments.append(argument)
            self.overrides.choices[group] = str(option)
            return
        targets = torch_classes(group, unknown, options)
        if isinstance(option, dict) and option and "_target_" not in option:
            key, value = next(leaves(option))
            self._refuse(
                argument,
                (
                    "a section takes no mapping; set each key separately, for example"
                    f" {group}.{key}={shown(value)}"
                ),
            )
        elif targets:
            self.overrides.set_value(f"{group}._target_", targets[0], targets[0])
        else:
            guess = _meant_option(group, option, unknown[0], options)
            rule = f"{group}={shown(option)}: must be one of {', '.join(options)}{guess}"
            unused = self.program.unused().get((group, unknown[0]))
            self.overrides.problems.append(unused or rule)

    def _read_own_trackers(self, items: list[Any]) -> list[Any] | str:
        """Set a key of `tracker.classes` for each class. Returns the other trackers."""
        names: list[str] = []
        for item in filter(_is_class, items):
            values = item
            if not isinstance(item, dict):
                values = {"_target_": item}
            name = snake_case(str(values["_target_"]).rpartition(".")[2])
            if name in names:
                name = f"{name}_{len(names) + 1}"
            names.append(name)
            self.overrides.set_value(tracker_key(name), values, in_grammar(values))
        return [item for item in items if not _is_class(item)] or "none"

    def choose_own_classes(self) -> None:
        """Choose the option `custom` of each section for which a class is given."""
        for section, options in OPTIONS.items():
            target = self.overrides.given.get(f"{section}._target_")
            if CUSTOM not in options or target is None:
                continue
            chosen = self.overrides.choices.get(section, CUSTOM)
            if chosen != CUSTOM:
                self.overrides.problems.append(
                    f"{section}._target_={shown(target)}: contradicts {section}={chosen}; give one"
                    " of them"
                )
            if f"{section}={CUSTOM}" not in self.overrides.arguments:
                self.overrides.choose_own_class(section)


def _as_one(argument: str) -> str:
    """The remedy for one value with commas, after another one; "" where a key takes none."""
    key, _, value = argument.partition("=")
    name = key.lstrip("+")
    if list_rule(name):
        return f", or for a list use {shlex.quote(f'{key}=[{value}]')}"
    if name in OPTIONS or not may_be_text(name):
        return ""
    return f", or for one value use {shlex.quote(f'{key}={in_double_quotes(value)}')}"


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def shorten(text: str) -> str:
    """A text for a message: an argument may be as long as a file."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... ({len(text):,} characters)"


def _meant_option(group: str, option: Any, unknown: str, options: list[str]) -> str:
    """The option of a group that was probably meant by an unknown one, for a message."""
    if "." in unknown and CUSTOM in options:
        target = unknown
        if isinstance(option, dict):
            target = option.get("_target_", unknown)
        return f"; for your own class use {group}._target_={target}"
    spelt = unknown.lower().replace("-", "_")
    if spelt in options:
        return f"; did you mean {spelt}?"
    if group == "strategy" and spelt.startswith(SHARDED):
        return (
            "; there is no sharded strategy: each GPU holds the whole"
            f" model{see_page('Out of memory, too big for one GPU')}"
        )
    if option is None:
        return ""
    return did_you_mean(unknown, options)


def _is_class(item: Any) -> bool:
    """Tell whether an item of `tracker=[...]` is a class: {_target_: my.Tracker}, or its path."""
    if isinstance(item, dict):
        return "_target_" in item
    return "." in str(item)


def _names_code(dotted: str) -> bool:
    """Tell whether Hydra, or Python's logging for it, would import what stands under a key."""
    return dotted.rpartition(".")[2] in ("_target_", "()", "class")


def _is_foreign(path: Any) -> bool:
    return not str(path).startswith(("hydra.", "hydra_plugins.", "logging."))
