"""The files of presets that a command chooses: what is in each, and what is wrong with it. Hydra
would speak of search paths instead, and end in a traceback where a key stands twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_train.config.bind import no_list
from ddp_train.config.program import PRESETS, Program
from ddp_train.config.values import leaves
from ddp_train.errors import ConfigError
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import SECTIONS
from ddp_train.text import did_you_mean, shown

UNNAMED = 'in "<unicode string>", '
"""What PyYAML says of a text that it did not open itself."""


class _OnceEach(yaml.SafeLoader):
    """Takes no key twice, as OmegaConf."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen and key.tag != "tag:yaml.org,2002:merge":
                raise KeyError(
                    f"line {key.start_mark.line + 1}: {key.value} stands there twice; keep one of"
                    " them"
                )
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def content_of(program: Program, path: Path) -> dict[str, Any]:
    """What a file says. Raises ConfigError if it cannot be read."""
    try:
        content = _OnceEach(path.read_text()).get_single_data()
    except KeyError as error:
        raise ConfigError([f"{program.shown(path)}: {error.args[0]}"]) from None
    except (yaml.YAMLError, ValueError, OSError) as error:
        reason = " ".join(str(error).replace(UNNAMED, "").split())
        raise ConfigError([f"{program.shown(path)}: cannot be read: {reason}"]) from error
    if not isinstance(content, dict | None):
        raise ConfigError([f"{program.shown(path)}: must hold keys and values, KEY: VALUE"])
    return content or {}


def chosen_presets(
    program: Program, chosen: Iterable[tuple[str, str | None]], problems: list[str]
) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """The files of presets, the group of each and what is in it; those that it takes up by its
    `defaults` before it. What is wrong with them is added to `problems`."""
    seen: set[Path] = set()

    def read(group: str, name: str | None) -> Iterator[tuple[str, Path, dict[str, Any]]]:
        path = program.file(group, name)
        if not path or path in seen:
            return
        seen.add(path)
        try:
            content = content_of(program, path)
        except ConfigError as error:
            problems.extend(error.problems)
            return
        lines = content.get("defaults") or []
        if not isinstance(lines, list):
            lines = content["defaults"] = []
            problems.append(
                f"{program.shown(path)}: defaults: must be a list, of lines `- override /optimizer:"
                " adamw`"
            )
        for line in lines:
            taken_up, problem = _taken_up(program, path, group, line)
            problems.extend([f"{program.shown(path)}: {problem}"] if problem else [])
            for other in taken_up:
                yield from read(*other)
        told = [
            *_wrong_kinds(program, content if group in PRESETS else {group: content}),
            *_unreadable(content),
        ]
        problems.extend(f"{problem} (in {program.shown(path)})" for problem in told if problem)
        yield group, path, content

    for group, name in chosen:
        yield from read(group, name)


def _wrong_kinds(program: Program, sections: dict[str, Any]) -> Iterator[str]:
    """What Hydra cannot merge: a list with keys and values, either way round."""
    for section, content in sections.items():
        if section not in {*OPTIONS, *SECTIONS}:
            yield no_list(section, content)
        elif isinstance(content, dict):
            yield from (no_list(f"{section}.{name}", value) for name, value in content.items())
            yield from (
                f"{section}: {name}: a key must be a word"
                for name in content
                if not isinstance(name, str)
            )
        elif (
            isinstance(content, str) and section in OPTIONS and content in program.options(section)
        ):
            yield (
                f"{section}={content}: an option is chosen in `defaults`, by `- override"
                f" /{section}: {content}`"
            )
        elif isinstance(content, list):
            yield f"{section}={shown(content)}: is a section; it holds keys and values, KEY: VALUE"


def _unreadable(content: dict[str, Any]) -> Iterator[str]:
    """What is begun as a reference to another key, and is none."""
    for key, value in leaves(content):
        try:
            OmegaConf.create([str(value)])
        except OmegaConfBaseException:
            yield (
                f"{key}={value}: must be a reference like ${{train.epochs}} or ${{oc.env:NAME}}, or"
                " without $"
            )


def _taken_up(
    program: Program, path: Path, group: str, line: Any
) -> tuple[list[tuple[str, str]], str]:
    """The groups and options that a line of `defaults` takes up, and what is wrong with it."""
    if isinstance(line, str):  # `shared` of the same group, or `/experiment/shared`
        if line.startswith("/"):
            place = line.removesuffix(".yaml")
        else:
            place = f"/{group}/{line.removesuffix('.yaml')}"
        place, _, name = place[1:].rpartition("/")
        if problem := program.unusable().get((place, name)):
            return [], f"defaults: {line}: {problem}"
        known = line.startswith("_") or place.startswith("hydra") or {"@", "$", " "} & {*line}
        if known or any(
            (folder / place / f"{name}.yaml").is_file() for folder in program.folders()
        ):
            return [(place, name)], ""
        return (
            [],
            (
                f"defaults: {line}: no such file in"
                f" {place}/{did_you_mean(name, program.options(place))}"
            ),
        )
    if not isinstance(line, dict) or len(line) != 1:
        return (
            [],
            f"defaults: {shown(line)}: must be `override /GROUP: OPTION`, or the name of a file",
        )
    ((key, option),) = line.items()
    name = str(key).removeprefix("override ").strip("/ ")
    found = f"defaults: {key}: {shown(option)}"
    own = (folder / name for folder in (path.parent, *program.folders()[1:]))
    if (
        {"@", "$", " "} & {*f"{name}{option}".replace(", ", ",")}
        or name.startswith("hydra/")
        or name in PRESETS
    ):
        return [], ""
    if not str(key).removeprefix("override ").startswith("/") and (path.parent / name).is_dir():
        return [], ""  # a group beside the file
    if not program.is_group(name):
        there_is = any(folder.is_dir() for folder in own)
        return (
            [],
            (
                ""
                if there_is
                else f"{found}: there is no group {name}{did_you_mean(name, program.groups())}"
            ),
        )
    if key != f"override /{name}":
        return (
            [],
            (
                f"{found}: every run has an option of {name}; use `- override /{name}:"
                f" {shown(option)}`"
            ),
        )
    if option is None and name not in OPTIONS:
        return [], ""
    chosen = [
        str(one).removesuffix(".yaml") for one in (option if isinstance(option, list) else [option])
    ]
    options = program.options(name)
    if wrong := [one for one in chosen if one not in options]:
        rule = (
            "must be one of"
            f" {', '.join(options)}{did_you_mean(wrong[0] if option else '', options)}"
        )
        return [], program.unusable().get((name, wrong[0])) or f"{found}: {rule}"
    return [(name, one) for one in chosen], ""


def nameless(program: Program, group: str, option: str) -> str:
    """What is wrong with an option of your own that does not say whose defaults it changes; "" if
    nothing."""
    path = program.file(group, option) if group in OPTIONS else None
    if path is None or schema_name(program, group, path) in (None, *OPTIONS[group]):
        return ""
    known = list(OPTIONS[group])
    code = ", or `_target_: package.Name`" if "custom" in known else ""
    return f"{program.shown(path)}: names none of {', '.join(known)}; add `name: {known[0]}`{code}"


def schema_name(program: Program, group: str, path: Path) -> str | None:
    """Whose defaults a file changes: of the option that it is called by, or that its `name` or
    `_target_` says. None if it cannot be read, which `chosen_presets` tells."""
    if path.stem in OPTIONS[group]:
        return path.stem
    try:
        content = content_of(program, path)
    except ConfigError:
        return None
    return str(content.get("name", "custom" if "_target_" in content else ""))
