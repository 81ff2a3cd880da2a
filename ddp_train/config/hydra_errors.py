"""Errors of Hydra and OmegaConf as messages that name the file to blame."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from ddp_train.config.keys import list_rule
from ddp_train.config.overrides import Overrides
from ddp_train.config.presets import BY_OVERRIDE, SCHEMA, content_of, origin_of
from ddp_train.config.program import PRESETS, Program
from ddp_train.config.yaml_files import error_text
from ddp_train.options.custom import NAME as CUSTOM
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import SECTIONS
from ddp_train.text import did_you_mean, shown


def composition_errors() -> tuple[type[Exception], ...]:
    """The classes of what Hydra raises where files under conf/ cannot be composed.

    A preset that includes itself ends in a RecursionError, a file that is not UTF-8 in a
    ValueError.
    """
    from hydra.errors import HydraException

    return (HydraException, OmegaConfBaseException, yaml.YAMLError, RecursionError, ValueError)


class HydraErrors:
    """The errors of one composition."""

    def __init__(self, program: Program, overrides: Overrides) -> None:
        self.program = program
        self.overrides = overrides

    def message(self, error: Exception) -> str:
        from hydra.errors import MissingConfigException

        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            return error_text(error, self.program.shown(Path(error.problem_mark.name)))
        if isinstance(error, MissingConfigException) and error.missing_cfg_file:
            return self._of_missing_file(str(error.missing_cfg_file))
        if isinstance(error, UnicodeDecodeError):
            return self._of_encoding(error)
        if isinstance(error, RecursionError):
            return "defaults: a preset includes itself; remove that line"
        return self._of_text(error)

    def _of_encoding(self, error: UnicodeDecodeError) -> str:
        """The message about a file that is not UTF-8, which Python does not name."""
        own = self.program.own
        for path in sorted(own.rglob("*.yaml")) if own else ():
            if path.read_bytes() == error.object:
                line = error.object.count(b"\n", 0, error.start) + 1
                return f"{self.program.shown(path)}: line {line}: is not UTF-8; save it as UTF-8"
        return str(error)

    def _of_missing_file(self, missing: str) -> str:
        """The message about an option, or a file, that the `defaults` of a preset name."""
        group, _, name = missing.removeprefix(f"{SCHEMA}/").rpartition("/")
        path = self.program.file(group, name)
        if path and group in OPTIONS:
            return self._of_unknown_schema(group, path)
        unused = self.program.unused().get((group, name))
        if unused:
            return unused
        rule = f"no such file; {BY_OVERRIDE}"
        options = self.program.options(group)
        if options:
            rule = f"must be one of {', '.join(options)}{did_you_mean(name, options)}"
        return f"{self._preset_with(name)}defaults: {group}: {name}: {rule}"

    def _of_unknown_schema(self, group: str, path: Path) -> str:
        """The message about an option whose own `name` is missing, or unknown."""
        known = list(OPTIONS[group])
        remedy = f"add `name: {known[0]}`"
        if CUSTOM in known:
            remedy += ", or `_target_: package.Name`"
        return f"{self.program.shown(path)}: its `name` must be one of {', '.join(known)}; {remedy}"

    def _of_text(self, error: Exception) -> str:
        """The message with the text of the error, which names a file at most by its beginning.

        That is `In 'experiment/mine': ...`.
        """
        cause = error.__cause__
        parts = [str(part) for part in (error, cause) if part and str(part)]
        text = re.sub(r"\s+full_key: .*$", "", ": ".join(parts), flags=re.DOTALL)
        text = " ".join(text.split())
        source = re.match(r"In '([^']+)/([^'/]+)': ", text)
        path = self.program.file(source[1], source[2]) if source else None
        if path and "Cannot merge" in text:
            return f"{_wrong_kind(path) or text} (in {self.program.shown(path)})"
        if "defaults" in text or "Multiple values" in text:
            return self._of_defaults(text)
        if isinstance(cause, GrammarParseError):
            return self._of_reference(text, str(cause.full_key or ""))
        key = getattr(error, "full_key", None)
        return f"{key}: {text}" if key else text

    def _of_defaults(self, text: str) -> str:
        group = re.search(r"'(\w+)'", text)
        guess = did_you_mean(group[1], self.program.groups()) if group else ""
        return f"{self._preset_with('defaults')}{text}{guess}; {BY_OVERRIDE}"

    def _of_reference(self, text: str, key: str) -> str:
        """The message about a value with a $, which begins a reference."""
        if not key:
            return text
        remedy = "write a reference like ${train.epochs} or ${oc.env:NAME}, or remove the $"
        origin = origin_of(key, self.program, self.overrides, self.overrides.choices)
        return f"{key}: {text}; {remedy}{origin}"

    def _preset_with(self, text: str) -> str:
        """The first of the chosen presets with a text in it, as the beginning of a message."""
        for group, option in self.overrides.presets.items():
            path = self.program.file(group, option)
            if path and text in path.read_text(errors="replace"):
                return f"{self.program.shown(path)}: "
        return ""


def _wrong_kind(path: Path) -> str:
    """The rule that a file breaks whose content Hydra cannot merge; "" if none is known.

    A list cannot be merged with keys and values.
    """
    content = content_of(path)
    if not content:
        return "must hold keys and values, KEY: VALUE"
    group = path.parent.name
    sections = content if group in PRESETS else {group: content}
    for section, values in sections.items():
        is_section = section in OPTIONS or section in SECTIONS
        if is_section and isinstance(values, list):
            return (
                f"{section}={shown(values)}: is a section; write keys and values in it, KEY: VALUE"
            )
        by_key = {section: values}
        if is_section and isinstance(values, dict):
            by_key = {f"{section}.{name}": value for name, value in values.items()}
        for key, value in by_key.items():
            rule = list_rule(key)
            if rule and isinstance(value, dict):
                return f"{key}={shown(value)}: {rule}"
    return ""
