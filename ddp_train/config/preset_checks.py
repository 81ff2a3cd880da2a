"""Checks of presets that Hydra has composed all the same.

Hydra merges a preset, and what it includes, over the options, whoever chose them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddp_train.config.keys import field_types, kinds_of
from ddp_train.config.overrides import Overrides
from ddp_train.config.presets import (
    BY_OVERRIDE,
    built_in_option,
    compose_options,
    content_of,
    defaults_of,
    included_options,
)
from ddp_train.config.program import PRESETS, Program, sets_a_run
from ddp_train.config.yaml_files import ambiguous
from ddp_train.options.custom import NAME as CUSTOM
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import Config


def problems(
    program: Program, overrides: Overrides, values: dict[str, Any], choices: dict[str, str]
) -> Iterator[str]:
    """Messages about presets that do not act as they were meant.

    values: the composed configuration.
    choices: the option of each group.
    """
    yield from _unused_files(program, choices)
    yield from _ambiguous_values(program, values, choices)
    if overrides.presets:
        sections = {name: values[name] for name in OPTIONS if isinstance(values[name], dict)}
        yield from _misplaced_options(program, choices)
        yield from _unchosen_options(program, sections, choices)
        yield from _replaced_options(program, sections, choices)
        yield from _replaced_classes(program, overrides, sections, choices)


def _unused_files(program: Program, choices: dict[str, str]) -> Iterator[str]:
    """Problems of chosen files of the user's own."""
    for group, option in choices.items():
        problem = program.problem_of(group, option)
        if problem:
            yield problem


def _ambiguous_values(
    program: Program, values: dict[str, Any], choices: dict[str, str]
) -> Iterator[str]:
    """Values in the user's own files that mean something else on a command line, or come twice."""
    for path in _own_files(program, choices):
        text = path.read_text(encoding="utf-8")
        group = path.parent.name
        prefix = f"{group}." if group in OPTIONS and not sets_a_run(text) else ""
        for found in ambiguous(text):
            key = f"{prefix}{found.key}"
            if _is_of_own_class(key, values) or not found.is_settled(kinds_of(key)):
                yield found.message(program.shown(path))
        yield from _chosen_twice(program.shown(path), defaults_of(path))


def _is_of_own_class(key: str, values: dict[str, Any]) -> bool:
    """Tell whether a key may be an argument of the user's own class, of any type."""
    content = values.get(key.partition(".")[0])
    return isinstance(content, dict) and content.get("name") == CUSTOM


def _chosen_twice(place: str, defaults: list[Any]) -> Iterator[str]:
    """Groups of which the `defaults` of a file choose an option twice. place: the file."""
    seen = set()
    for item in defaults:
        for group in item if isinstance(item, dict) else ():
            if group in seen:
                yield f"{place}: {group} is there twice; keep one of them"
            seen.add(group)


def _own_files(program: Program, choices: dict[str, str]) -> list[Path]:
    """The user's own files that were chosen, and those that their `defaults` include."""
    if not program.own:
        return []
    waiting = [
        program.own / group.partition("@")[0] / f"{name}.yaml"
        for group, option in choices.items()
        for name in re.findall(r"[^\s\[\],']+", option)
    ]
    files: list[Path] = []
    while waiting:
        path = waiting.pop()
        if path in files or not path.is_file():
            continue
        files.append(path)
        for group, name in included_options(path):  # from its folder on, or from conf/
            file = f"{group}/{name}.yaml".lstrip("/")
            waiting += (path.parent / file, program.own / file)
    return sorted(files)


def _misplaced_options(program: Program, choices: dict[str, str]) -> Iterator[str]:
    """Options whose keys become keys of the run, as by `/optimizer@_here_: adamw`."""
    for place, option in choices.items():
        group, _, package = place.partition("@")
        if group in OPTIONS and package == "_global_":
            files = [
                path
                for path in _presets(program, choices)
                if f"{group}@" in path.read_text(errors="replace")
            ]
            rule = (
                f"would set keys of the run, not of {group}; {BY_OVERRIDE}{_blamed(program, files)}"
            )
            yield f"defaults: /{place}: {option}: {rule}"


def _replaced_options(
    program: Program, sections: dict[str, dict[str, Any]], choices: dict[str, str]
) -> Iterator[str]:
    """Built-in options that a preset names beside the one that was chosen."""
    defaults = Config()
    for section, content in sections.items():
        choice = choices[section]
        name = str(content.get("name"))
        path = program.file(section, choice)
        is_default = choice == getattr(defaults, section).name
        # `bind` reports a class beside a built-in option.
        if path is None or is_default or content.get("_target_"):
            continue
        if name != built_in_option(program, section, path):
            yield _contradiction(program, choices, f"{section}.name", name)


def _unchosen_options(
    program: Program, sections: dict[str, dict[str, Any]], choices: dict[str, str]
) -> Iterator[str]:
    """Built-in options that a preset of a whole run only names: the default option's keys, which
    the named one does not have, stay."""
    defaults = Config()
    for section, content in sections.items():
        name = str(content.get("name"))
        default = getattr(defaults, section).name
        schema = OPTIONS[section].get(name)
        if choices[section] != default or name in (default, CUSTOM) or schema is None:
            continue
        files = _naming(program, choices, section, "name", name)
        if files and not content.keys() <= field_types(schema).keys():
            yield (
                f"{section}.name={name}: the keys of {section}={default} stay beside a name; in an"
                f" experiment choose the option by `defaults: [override /{section}: {name}]`"
                f"{_blamed(program, files)}"
            )


def _replaced_classes(
    program: Program,
    overrides: Overrides,
    sections: dict[str, dict[str, Any]],
    choices: dict[str, str],
) -> Iterator[str]:
    """Classes that a preset names beside an option that was chosen, and that has one of its own.

    Another composition, of options without a class, shows what is named there.
    """
    disputed = []
    for section, content in sections.items():
        choice = choices[section]
        is_typed = section in overrides.choices
        if choice == CUSTOM or content.get("name") != CUSTOM:
            continue
        if is_typed or content.get("_target_") != _class_of(program, section, choice):
            disputed.append(section)
    if not disputed:
        return
    others = [text for text in overrides.choice_arguments if text.partition("=")[0] not in disputed]
    without_class = [f"{section}={CUSTOM}" for section in disputed]
    composed, _ = compose_options(program, [*others, *without_class])
    for section in disputed:
        target = composed[section].get("_target_")
        if target:
            yield _contradiction(program, choices, f"{section}._target_", target)


def _class_of(program: Program, section: str, option: str) -> str | None:
    """The class that the file of an option names."""
    path = program.file(section, option)
    return content_of(path).get("_target_") if path else None


def _contradiction(program: Program, choices: dict[str, str], key: str, value: str) -> str:
    """The message about a key of a preset beside an option that was chosen."""
    section, _, name = key.partition(".")
    files = _naming(program, choices, section, name, value)
    rule = f"contradicts {section}={choices[section]}; give one of them{_blamed(program, files)}"
    return f"{key}={value}: {rule}"


def _naming(
    program: Program, choices: dict[str, str], section: str, name: str, value: str
) -> list[Path]:
    """The files of whole runs that give a key of a section a value."""
    files = []
    for path in _presets(program, choices):
        content = content_of(path).get(section)
        if isinstance(content, dict) and content.get(name) == value:
            files.append(path)
    return files


def _presets(program: Program, choices: dict[str, str]) -> list[Path]:
    """The files of whole runs: the chosen ones, then all, of which these may include some."""
    chosen = [program.file(group, choices.get(group)) for group in PRESETS]
    others = [path for group in PRESETS for path in program.files(group)]
    return [path for path in (*chosen, *others) if path]


def _blamed(program: Program, files: list[Path]) -> str:
    return f" (in {program.shown(files[0])})" if files else ""
