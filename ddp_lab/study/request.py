"""A request for a study: its file, the changes of the command line to it, and the overrides for its
runs."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ddp_train.config.auto import resolve
from ddp_train.config.bind import bind_fields
from ddp_train.config.overrides import read_config, read_overrides
from ddp_train.config.program import Program
from ddp_train.config.validate import check, check_rules, section_rules
from ddp_train.distributed.environment import new_run_id, visible_devices
from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware, detect_hardware
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.options.key import range_of
from ddp_train.options.schema import Config, RequestedRun
from ddp_train.text import did_you_mean

PROCESSES = "launch.nproc_per_node"
STUDY_KEYS = ("mode", "study", "run_dir", "name")
"""Keys on the command line that concern the study itself; all others are overrides for its runs."""
SHARED = "{}: all trials would share it; leave it out of a study"


@dataclass(frozen=True)
class Request:
    """A study to run. settings: its file with the `study.KEY=VALUE` of the command line applied."""

    name: str
    settings: dict[str, Any]
    overrides: list[str]
    """For every run."""
    run_dir: Path
    program: Program
    argv: list[str]
    """The whole command line."""
    stop: StopRequests = field(default_factory=StopRequests)
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Released at the end of the study: the lock of `run_dir`."""

    @property
    def command(self) -> str:
        """The command that repeats this study, or continues it."""
        given = [override for override in self.argv if not override.startswith("run_dir=")]
        return self.program.command([*given, f"run_dir={self.run_dir}"])


def key_of(override: str) -> str:
    """The key or group of an override."""
    return override.lstrip("+~").partition("=")[0]


def read_request(program: Program, overrides: list[str]) -> Request:
    """Parses the command line. Raises ConfigError for every mistake that shows without composing a
    run."""
    names = program.options("study")
    flags = [
        f"{override}: mode=study takes no flag but --help; leave it out"
        for override in overrides
        if override.startswith("-")
    ]
    given: dict[str, str] = {
        key_of(override): override.partition("=")[2]
        for override in overrides
        if not override.startswith("-")
    }
    name = given.get("study", "")
    if not name:
        flags.append(
            f"mode=study: needs the name of a study; add study={names[0]}, or one of"
            f" {', '.join(names[1:])}"
        )
    elif name not in names:
        flags.append(f"study={name}: must be one of {', '.join(names)}{did_you_mean(name, names)}")
    if flags:
        raise ConfigError(flags)
    settings = yaml.safe_load(
        dict(zip(names, program.files("study"), strict=True))[name].read_text()
    )
    changes = [override for override in overrides if key_of(override).startswith("study.")]
    problems = [problem for override in changes for problem in _apply_override(settings, override)]
    for_runs = [
        override
        for override in overrides
        if key_of(override) not in STUDY_KEYS and override not in changes
    ]
    problems += read_overrides(program, for_runs).problems
    problems += [
        SHARED.format(word)
        for word in for_runs
        if word.partition("=")[0].lstrip("+") == "checkpoint.mirror"
    ]
    settings = _interpolated(settings, settings, problems)
    if problems:
        raise ConfigError(problems)
    folder = given.get("run_dir") or f"runs/{given.get('name', 'study')}/{name}_{new_run_id(None)}"
    return Request(name, settings, for_runs, Path(folder), program, overrides)


def bind_settings(schema: type, settings: dict[str, Any]) -> Any:
    """Binds the settings to a dataclass whose fields are made by `options.key.key`. Raises
    ConfigError."""
    problems: list[str] = []
    bound = bind_fields(schema, "study.", settings, problems)
    problems = problems or section_rules(bound, "study.")
    if problems:
        raise ConfigError(problems)
    return bound


@dataclass(frozen=True)
class ResolvedRun:
    """The config of a run, resolved for this machine if it is valid. Its problems: invalid keys or
    values, and what makes a valid config unsuited to this machine."""

    config: Config
    invalid: list[str]
    unsuited: list[str]

    @property
    def problems(self) -> list[str]:
        return self.invalid + self.unsuited


def resolve_run(program: Program, overrides: list[str], hardware: Hardware) -> ResolvedRun:
    """Composes, resolves and checks the config of a run."""
    config, invalid = read_config(program, read_overrides(program, overrides))
    invalid = invalid or check_rules(config)
    if invalid:
        return ResolvedRun(config, invalid, [])
    asked = config.launch.nproc_per_node
    if given := range_of(asked):
        return ResolvedRun(
            config,
            [
                f"{PROCESSES}={asked}: a study compares runs whose numbers stay; use one number,"
                f" {PROCESSES}={given.low}"
            ],
            [],
        )
    if mirror := config.checkpoint.mirror:
        return ResolvedRun(config, [SHARED.format(f"checkpoint.mirror={mirror}")], [])
    resolved = resolve(config, hardware, None)
    return ResolvedRun(resolved, [], check(RequestedRun(config, resolved, hardware)))


def this_hardware() -> Hardware:
    """The cores and visible GPUs of this host."""
    return detect_hardware(visible_devices())


def _apply_override(settings: dict[str, Any], override: str) -> list[str]:
    """Applies `study.KEY.KEY=VALUE` to the settings. Returns the problems."""
    try:
        value = yaml.safe_load(override.partition("=")[2])
    except yaml.YAMLError:
        return [
            f"{override}: the value is not valid YAML; quote it, as in"
            f" '{key_of(override)}=[optimizer.lr=1,seed=2]'"
        ]
    *path, last = key_of(override).split(".")[1:]
    place = settings
    for part in path:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            return [
                f"{override}: study.{part} is a value without keys of its own; use"
                f" study.{part}=VALUE"
            ]
    place[last] = value
    return []


def _interpolated(value: Any, settings: dict[str, Any], problems: list[str]) -> Any:
    """Replaces `${study.KEY}` by that setting in all strings."""
    if isinstance(value, dict):
        return {name: _interpolated(item, settings, problems) for name, item in value.items()}
    if isinstance(value, list):
        return [_interpolated(item, settings, problems) for item in value]
    if not isinstance(value, str):
        return value

    def found(match: re.Match[str]) -> str:
        if match[1] not in settings:
            problems.append(
                f"{match[0]}: the file of the study has no key study.{match[1]}; correct it there"
            )
        return str(settings.get(match[1]))

    return re.sub(r"\$\{study\.(\w+)\}", found, value)
