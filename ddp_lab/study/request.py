"""A request for a study: its file, the changes of the command line to it, and the overrides for its
runs."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ddp_train.config.auto import resolve
from ddp_train.config.bind import bind_fields
from ddp_train.config.composition import read_config
from ddp_train.config.overrides import read_overrides
from ddp_train.config.program import Program
from ddp_train.config.validate import broken_rules_in, check, check_rules
from ddp_train.config.yaml_files import ambiguous, load_yaml, read_file
from ddp_train.distributed.environment import new_run_id, visible_devices
from ddp_train.errors import ConfigError, LaunchError
from ddp_train.hardware import Hardware, detect_hardware
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.options.key import range_of
from ddp_train.options.schema import Config, RequestedRun
from ddp_train.resilience.preemption import UNSAVED
from ddp_train.text import did_you_mean, word

PROCESSES = "launch.nproc_per_node"
STUDY_KEYS = ("mode", "study", "run_dir", "name")
"""Keys on the command line that concern the study itself; all others are overrides for its runs."""
SHARED = "{}: all trials of a study would use the same one; leave this key out"


@dataclass(frozen=True)
class Request:
    """A study to run."""

    name: str
    settings: dict[str, Any]
    """The file of the study with the `study.KEY=VALUE` of the command line applied."""
    overrides: list[str]
    """Overrides for every run."""
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
        argv = [override for override in self.argv if key_of(override) != "run_dir"]
        return self.program.command([*argv, word("run_dir", self.run_dir)])

    @functools.cached_property
    def hardware(self) -> Hardware:
        """The cores and visible GPUs of this host."""
        return detect_hardware(visible_devices())

    def resolve(self, overrides: list[str]) -> ResolvedRun:
        """Compose, resolve and check the config of one run of the study, for this host.

        overrides: all overrides of the run.

        Returns the config and the problems that were found in it.
        """
        return resolve_run(self.program, overrides, self.hardware)

    def exit_code(self, has_result: bool) -> int:
        """The exit code at the end of the study."""
        if self.stop.received:
            return self.stop.exit_code(UNSAVED)
        return 0 if has_result else LaunchError.exit_code


def key_of(override: str) -> str:
    """The key or group of an override."""
    return override.lstrip("+~").partition("=")[0]


def raise_problems(problems: Sequence[str]) -> None:
    """Raise ConfigError if there are problems, each once."""
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def read_request(program: Program, argv: list[str]) -> Request:
    """Parse the command line. Raises ConfigError for every mistake that shows without composing a
    run."""
    values = {
        key_of(override): override.partition("=")[2]
        for override in argv
        if not override.startswith("-")
    }
    name = values.get("study", "")
    raise_problems(_problems_of_name(name, argv, program.options("study")))
    path = program.file("study", name)
    assert path, "it is one of the options"
    settings = read_file(path, program.shown(path))
    overrides = []
    problems = []
    for override in argv:
        key = key_of(override)
        if key.startswith("study."):
            problems += _apply_override(settings, override)
        elif key not in STUDY_KEYS:
            overrides.append(override)
    problems += read_overrides(program, overrides).problems
    problems += [
        SHARED.format(override) for override in overrides if key_of(override) == "checkpoint.mirror"
    ]
    settings = _interpolated(settings, settings, problems)
    raise_problems(problems)
    folder = (
        values.get("run_dir") or f"runs/{values.get('name', 'study')}/{name}_{new_run_id(None)}"
    )
    return Request(name, settings, overrides, Path(folder), program, argv)


def _problems_of_name(name: str, argv: list[str], names: list[str]) -> list[str]:
    """Problems with the name of the study, and with flags."""
    problems = [
        f"{override}: mode=study takes no flag but --help; leave it out"
        for override in argv
        if override.startswith("-")
    ]
    if not name:
        problems.append(
            f"mode=study: needs the name of a study; add study={names[0]}, or one of"
            f" {', '.join(names[1:])}"
        )
    elif name not in names:
        problems.append(
            f"study={name}: must be one of {', '.join(names)}{did_you_mean(name, names)}"
        )
    return problems


def bind_settings(schema: type, settings: dict[str, Any]) -> Any:
    """The settings as a dataclass whose fields are made by `options.key.key`. Raises
    ConfigError."""
    problems: list[str] = []
    bound = bind_fields(schema, "study.", settings, problems)
    raise_problems(problems or broken_rules_in(bound, "study."))
    return bound


@dataclass(frozen=True)
class ResolvedRun:
    """The config of a run, resolved for this machine if it is valid."""

    config: Config
    invalid: list[str] = field(default_factory=list)
    """Problems with keys or values."""
    unsuited: list[str] = field(default_factory=list)
    """Problems that make a valid config unsuited to this machine."""

    @property
    def problems(self) -> list[str]:
        return self.invalid + self.unsuited


def resolve_run(program: Program, overrides: list[str], hardware: Hardware) -> ResolvedRun:
    """Compose, resolve and check the config of a run."""
    config, invalid = read_config(program, read_overrides(program, overrides))
    invalid = invalid or check_rules(config)
    processes = config.launch.nproc_per_node
    mirror = config.checkpoint.mirror
    if not invalid and (given := range_of(processes)):
        invalid = [
            f"{PROCESSES}={processes}: a study needs a fixed number of processes; use"
            f" {PROCESSES}={given.low}"
        ]
    elif not invalid and mirror:
        invalid = [SHARED.format(f"checkpoint.mirror={mirror}")]
    if invalid:
        return ResolvedRun(config, invalid)
    resolved = resolve(config, hardware, None)
    return ResolvedRun(resolved, unsuited=check(RequestedRun(config, resolved, hardware)))


def _apply_override(settings: dict[str, Any], override: str) -> list[str]:
    """Apply `study.KEY.KEY=VALUE` to the settings. Returns the problems."""
    try:
        text = override.partition("=")[2]
        value = load_yaml(text)
        found = [one.message(override) for one in ambiguous(text)]
        if found:
            return found
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
    """Replace `${study.KEY}` by that setting in all strings."""
    if isinstance(value, dict):
        return {name: _interpolated(item, settings, problems) for name, item in value.items()}
    if isinstance(value, list):
        return [_interpolated(item, settings, problems) for item in value]
    if not isinstance(value, str):
        return value

    def found(match: re.Match[str]) -> str:
        if match[1] not in settings:
            problems.append(
                f"{match[0]}: the file of the study has no key study.{match[1]}; add the key"
                " there, or correct its name"
            )
        return str(settings.get(match[1]))

    return re.sub(r"\$\{study\.(\w+)\}", found, value)
