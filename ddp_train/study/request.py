"""What `mode=study` asks for: the study's file, what the command line changes in it, and the words for its runs."""

from __future__ import annotations

import contextlib
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ddp_train.config.bind import bind_fields
from ddp_train.config.overrides import read_overrides
from ddp_train.config.validate import section_rules
from ddp_train.distributed.environment import new_run_id
from ddp_train.errors import ConfigError
from ddp_train.launcher.local import StopRequests
from ddp_train.text import did_you_mean

STUDY_KEYS = ("mode", "study", "run_dir", "name")
"""Words about the study itself; all others go to its runs."""


@dataclass(frozen=True)
class Request:
    """A study to be made: its settings are those of its file, with the command line's `study.KEY=VALUE` in them."""

    name: str
    settings: dict[str, Any]
    overrides: list[str]
    """Overrides for every run."""
    run_dir: Path
    script: Path
    conf: Path
    argv: list[str]
    """The whole command line."""
    stop: StopRequests = field(default_factory=StopRequests)
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """What is given back when the study is over: the lock of `run_dir`."""

    @property
    def command(self) -> str:
        """What makes this report again, or goes on with it."""
        given = [word for word in self.argv if not word.startswith("run_dir=")]
        return shell_command([*given, f"run_dir={self.run_dir}"])


def shell_command(overrides: list[str]) -> str:
    """A command line to be pasted into a shell."""
    return shlex.join(["python", "launch.py", *overrides])


def key_of(word: str) -> str:
    """The key or group of an override."""
    return word.lstrip("+~").partition("=")[0]


def read_request(script: Path, conf: Path, overrides: list[str]) -> Request:
    """Raises ConfigError for what can be seen without composing a run."""
    names = study_names(conf)
    flags = [f"{word}: mode=study takes no flag but --help; leave it out" for word in overrides if word.startswith("-")]
    given: dict[str, str] = {key_of(word): word.partition("=")[2] for word in overrides if not word.startswith("-")}
    name = given.get("study", "")
    if not name:
        flags.append(f"mode=study: which one? add study={names[0]}, or one of {', '.join(names[1:])}")
    elif name not in names:
        flags.append(f"study={name}: must be one of {', '.join(names)}{did_you_mean(name, names)}")
    if flags:
        raise ConfigError(flags)
    settings = yaml.safe_load((conf / "study" / f"{name}.yaml").read_text())
    changes = [word for word in overrides if key_of(word).startswith("study.")]
    problems = [problem for word in changes for problem in _apply_override(settings, word)]
    for_runs = [word for word in overrides if key_of(word) not in STUDY_KEYS and word not in changes]
    problems += read_overrides(conf, for_runs).problems
    settings = _interpolated(settings, settings, problems)
    if problems:
        raise ConfigError(problems)
    folder = given.get("run_dir") or f"runs/{given.get('name', 'study')}/{name}_{new_run_id(None)}"
    return Request(name, settings, for_runs, Path(folder), script, conf, overrides)


def study_names(conf: Path) -> list[str]:
    """The studies that there are."""
    return sorted(path.stem for path in (conf / "study").glob("*.yaml"))


def bind_settings(schema: type, settings: dict[str, Any]) -> Any:
    """The settings bound to a dataclass whose fields are made by `config.schema.key`. Raises ConfigError."""
    problems: list[str] = []
    bound = bind_fields(schema, "study.", settings, problems)
    problems = problems or section_rules(bound, "study.")
    if problems:
        raise ConfigError(problems)
    return bound


def _apply_override(settings: dict[str, Any], word: str) -> list[str]:
    """Puts the value of `study.KEY.KEY=VALUE` where it belongs. Returns what is wrong with it."""
    try:
        value = yaml.safe_load(word.partition("=")[2])
    except yaml.YAMLError:
        return [f"{word}: not a value in YAML; for example '{key_of(word)}=[optimizer.lr=1,seed=2]'"]
    *path, last = key_of(word).split(".")[1:]
    place = settings
    for part in path:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            return [f"{word}: study.{part} holds no keys of its own"]
    place[last] = value
    return []


def _interpolated(value: Any, settings: dict[str, Any], problems: list[str]) -> Any:
    """`${study.KEY}` replaced by that setting, in all texts."""
    if isinstance(value, dict):
        return {name: _interpolated(item, settings, problems) for name, item in value.items()}
    if isinstance(value, list):
        return [_interpolated(item, settings, problems) for item in value]
    if not isinstance(value, str):
        return value

    def found(match: re.Match[str]) -> str:
        if match[1] not in settings:
            problems.append(f"{match[0]}: the study has no such key")
        return str(settings.get(match[1]))

    return re.sub(r"\$\{study\.(\w+)\}", found, value)
