"""The frozen config: plain data in run_dir/config.yaml, which every process of a run reads."""

from __future__ import annotations

import dataclasses
import datetime
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

from ddp_train.config.external_checks import unwritable
from ddp_train.config.migrate import bind_frozen
from ddp_train.config.schema import Config
from ddp_train.errors import ConfigError
from ddp_train.resilience.failure_report import FILE as FAILURE
from ddp_train.resilience.failure_report import SUMMARY

FILE = "config.yaml"
COMMANDS = "commands.jsonl"
"""In the run directory: a line for each command that worked in it."""
GIT_SECONDS = 5.0
"""The longest wait for a revision; a file server may be slow."""


def freeze(config: Config) -> str:
    """Writes the config into its run directory, atomically, and returns the text.

    Raises ConfigError if the directory cannot be written.
    """
    text = to_text(config)
    run_dir = Path(str(config.run_dir))
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        part = run_dir / (FILE + ".part")
        part.write_text(text)
        part.replace(run_dir / FILE)
        for name in (FAILURE, SUMMARY):  # these two describe the latest run only
            (run_dir / name).unlink(missing_ok=True)
        for name in (FILE, FAILURE, SUMMARY, "metrics.jsonl"):  # of processes that were killed while they wrote
            for left in run_dir.glob(f"{name}.part*"):
                left.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError([unwritable(config.run_dir, error.strerror or str(error))]) from None
    return text


def record_command(run_dir: Path, command: str) -> None:
    """Adds a command to those of the run directory, with the time (UTC), and the revision of the code in the
    working folder, null if that is no git repository. Raises OSError."""
    started = datetime.datetime.now(datetime.UTC).isoformat()
    line = {"command": command, "started": started, "git_revision": git_revision()}
    with (run_dir / COMMANDS).open("a") as file:
        file.write(json.dumps(line) + "\n")


def git_revision() -> str | None:
    """Of the working folder; None if it has none, or git does not say."""
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def facts_of_start(run_dir: Path) -> dict[str, Any]:
    """For summary.json: what `record_command` wrote last, null if it did not, and the seconds since then."""
    try:
        line = json.loads((run_dir / COMMANDS).read_text().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        line = dict.fromkeys(("command", "started", "git_revision"))
    started = line["started"]
    wall = started and time.time() - datetime.datetime.fromisoformat(started).timestamp()
    return {**line, "wall_seconds": wall}


def to_text(config: Config) -> str:
    """The config as the YAML that `load_frozen` reads."""
    return yaml.safe_dump(to_values(config), sort_keys=False)


def to_values(config: Config) -> dict[str, Any]:
    """The config as plain nested values."""
    return dataclasses.asdict(config)


def load_frozen(text: str) -> Config:
    """Loads what `freeze` wrote, in this version or an earlier one. Raises ConfigError if it is corrupt."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError([f"{FILE}: not plain YAML: {' '.join(str(error).split())}"]) from None
    config, problems = bind_frozen(values) if isinstance(values, dict) else (Config(), [f"{FILE}: not a mapping"])
    if problems:
        raise ConfigError([f"{FILE}: {problem}" for problem in problems])
    return config
