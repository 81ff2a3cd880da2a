"""The frozen config: plain data in run_dir/config.yaml, which every process of a run reads."""

from __future__ import annotations

import dataclasses
import datetime
import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

from ddp_train.config.bind import bind
from ddp_train.config.run_directory import unwritten
from ddp_train.config.yaml_files import dump_yaml
from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware, hardware_description, versions
from ddp_train.options.key import range_of
from ddp_train.options.schema import Config, schema_of
from ddp_train.plain_yaml import load_plain_yaml
from ddp_train.resilience.failure_report import FILE as FAILURE
from ddp_train.resilience.failure_report import SUMMARY
from ddp_train.resilience.whole_files import write_text

FILE = "config.yaml"
REMEDY = "; restore the file, or use another run_dir"
"""For a config.yaml that somebody has changed."""
COMMANDS = "commands.jsonl"
"""In the run directory: a line for each command that worked in it."""
GIT_SECONDS = 5.0
"""The longest wait for a revision; a file server may be slow."""
NOT_ASKED_FOR = (
    "run_dir",
    "reasons",
    "chosen_keys",
    "process_range",
    "process_counts",
    "host_range",
)
"""Fields of a config that follow from others, or are of one run."""


def freeze(config: Config) -> str:
    """Write the config into its run directory, atomically. Returns the text.

    Raises ConfigError if the directory cannot be written.
    """
    text = to_text(config)
    run_dir = Path(str(config.run_dir))
    of_latest_run = (FAILURE, SUMMARY)
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        write_text(run_dir / FILE, text)
        for name in of_latest_run:
            (run_dir / name).unlink(missing_ok=True)
        # Of processes that were killed while they wrote.
        for name in (FILE, *of_latest_run, "metrics.jsonl"):
            for part in run_dir.glob(f"{name}.part*"):
                part.unlink(missing_ok=True)
    except OSError as error:
        raise unwritten(config.run_dir, error) from None
    return text


def record_command(run_dir: Path, command: str, hardware: Hardware) -> None:
    """Add a command to those of the run directory. Raises OSError.

    With it stand the time (UTC), host, hardware, versions, and the revision of the code in the
    working folder, null if that is not a git repository.
    """
    line = {
        "command": command,
        "started": datetime.datetime.now(datetime.UTC).isoformat(),
        "git_revision": git_revision(),
        "host": socket.gethostname(),
        "hardware": hardware_description(hardware),
        "versions": versions(),
    }
    with (run_dir / COMMANDS).open("a") as file:
        file.write(json.dumps(line) + "\n")


def git_revision() -> str | None:
    """The revision of the working folder; None if it has none, or git does not say."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def facts_of_start(run_dir: Path) -> dict[str, Any]:
    """The last line of `record_command`, its values null if there is none, for summary.json.

    The seconds since then stand beside it.
    """
    try:
        line = json.loads((run_dir / COMMANDS).read_text().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        line = dict.fromkeys(("command", "started", "git_revision"))
    started = line.get("started")
    wall_seconds = None
    if started:
        wall_seconds = time.time() - datetime.datetime.fromisoformat(started).timestamp()
    return {**line, "wall_seconds": wall_seconds}


def run_facts(config: Config) -> dict[str, Any]:
    """The fields of summary.json that are known before the run starts."""
    return {
        "mode": config.mode,
        "strategy": config.strategy.name,
        "world_size": config.process_count,
        "device": config.device,
        "backend": config.launch.backend if config.strategy.has_process_group else "none",
        "global_batch_size": config.train.global_batch_size,
        "epochs": config.train.most_epochs,
        "seed": config.seed,
    }


def to_text(config: Config) -> str:
    """The config as the YAML that `load_frozen` reads."""
    return dump_yaml(to_values(config))


def to_values(config: Any) -> dict[str, Any]:
    """A config, or a section, as plain nested values."""
    return dataclasses.asdict(config)


def not_default(config: Config) -> dict[str, Any]:
    """The keys of a resolved config, dotted, that were set to something else than their default.

    What `auto` chose for this hardware is not among them. Options that are not the default ones
    are, as `model: mlp`.
    """
    defaults = Config()
    found: dict[str, Any] = {}
    for section, value in vars(config).items():
        default = getattr(defaults, section)
        if section in NOT_ASKED_FOR:
            continue
        if not dataclasses.is_dataclass(value):
            if value != default:
                found[section] = value
            continue
        name = getattr(value, "name", None)
        if name is not None and name != getattr(default, "name", None):
            found[section] = name
        schema = schema_of(section, str(name))
        known = {}
        if schema is not None:
            known = to_values(schema())
        found |= _differing(section, to_values(value), known)
    for key in config.chosen_keys:
        found.pop(key, None)
    if config.process_range:
        found["launch.nproc_per_node"] = config.process_range
    if config.host_range:
        found["launch.nnodes"] = config.host_range
    return found


def _differing(prefix: str, values: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        default = known.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            found |= _differing(f"{prefix}.{name}", value, default)
        elif name != "name" and value != default:
            found[f"{prefix}.{name}"] = value
    return found


def load_frozen(text: str) -> Config:
    """Load what `freeze` wrote. Raises ConfigError if it is corrupt."""
    try:
        values = load_plain_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            [f"{FILE}: not plain YAML: {' '.join(str(error).split())}{REMEDY}"]
        ) from None
    if not isinstance(values, dict):
        raise ConfigError([f"{FILE}: must hold keys and values, KEY: VALUE{REMEDY}"])
    config, problems = bind_frozen(values)
    if problems:
        raise ConfigError([f"{FILE}: {problem}" for problem in problems])
    return config


def bind_frozen(values: dict[str, Any]) -> tuple[Config, list[str]]:
    """Bind a frozen config. Returns it, with the default of each wrong key, and all problems."""
    values = dict(values)
    reasons = values.pop("reasons", {})
    chosen_keys = values.pop("chosen_keys", [])
    process_range = values.pop("process_range", None)
    counts = values.pop("process_counts", [])
    hosts = values.pop("host_range", None)
    config, problems = bind(values)
    if hosts is None or range_of(hosts):
        config.host_range = hosts
    else:
        problems.append("host_range: must be a range, as 2:3")
    are_counts = isinstance(counts, list) and all(type(count) is int for count in counts)
    if range_of(process_range) and are_counts:
        config.process_range = process_range
        config.process_counts = counts
    elif process_range or counts:
        problems.append(
            "process_range, process_counts: must be a range, as 2:8, and the numbers in it"
        )
    if isinstance(chosen_keys, list):
        config.chosen_keys = [str(key) for key in chosen_keys]
    else:
        problems.append("chosen_keys: must be a list of keys")
    if isinstance(reasons, dict):
        config.reasons = {str(name): str(reason) for name, reason in reasons.items()}
    else:
        problems.append("reasons: must be a mapping from switches to texts")
    return config, problems
