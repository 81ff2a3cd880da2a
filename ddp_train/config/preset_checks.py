"""Checks of presets that Hydra has composed all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp_train.config.overrides import Overrides
from ddp_train.config.presets import compose_options, content_of
from ddp_train.config.program import PRESETS, Program
from ddp_train.options.custom import NAME as CUSTOM
from ddp_train.options.registry import OPTIONS


def problems(
    program: Program, overrides: Overrides, values: dict[str, Any], choices: dict[str, str]
) -> Iterator[str]:
    """Messages about presets that do not act as they were meant.

    values: the composed configuration.
    choices: the option of each group.
    """
    yield from _unused_files(program, choices)
    yield from _replaced_classes(program, overrides, values)


def _unused_files(program: Program, choices: dict[str, str]) -> Iterator[str]:
    """Problems of chosen files of the user's own."""
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
    others = [text for text in overrides.choice_arguments if text.partition("=")[0] not in sections]
    without_class = [f"{section}={CUSTOM}" for section in sections]
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
            content = content_of(path).get(section)
            if isinstance(content, dict) and content.get("_target_") == target:
                return f" (in {program.shown(path)})"
    return ""
