"""Owners of run folders: a run with a config, a script, or a sweep. Torch-free."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from ddp_train.checkpoints.layout import places, read_manifest
from ddp_train.config.freeze import COMMANDS
from ddp_train.resilience.failure_report import SUMMARY

SWEEP_RESULTS = "results.jsonl"
"""In the folder of a sweep. Its trials have folders of their own in it."""
SWEEP_TRIALS = "trials.jsonl"
"""In the folder of a sweep: a line for each trial that a start of the sweep takes up."""
SESSION = "session"
"""The mode of a session in its summary.json."""


def is_of_run(folder: Path) -> bool:
    """Tell whether a run with a config works or has worked in this folder."""
    return (folder / COMMANDS).exists() or "config" in _first_manifest(places(folder))


def is_of_script(folder: Path) -> bool:
    """Tell whether a script of the user's has this folder: `ddp_train.session`, or a loop that
    calls `save_checkpoint`. Their checkpoints have no config."""
    if is_of_run(folder):
        return False
    return has_no_config(places(folder)) or _mode_in_summary(folder) == SESSION


def has_no_config(checkpoints: list[Path]) -> bool:
    """Tell whether there are checkpoints, and the first of them with a valid manifest has no
    config."""
    manifest = _first_manifest(checkpoints)
    return bool(manifest) and "config" not in manifest


def has_runs_files(folder: Path) -> bool:
    """Tell whether a folder is that of one run, or of one script."""
    return any((folder / name).exists() for name in ("checkpoints", COMMANDS))


def is_of_sweep(folder: Path) -> bool:
    """Tell whether a folder is a sweep's, which may have been ended before its first result.

    The first line of its files tells, since they may be the user's.
    """
    for name in (SWEEP_RESULTS, SWEEP_TRIALS):
        with contextlib.suppress(OSError, ValueError), (folder / name).open() as file:
            if '"trial":' in file.readline():
                return True
    return False


def _first_manifest(checkpoints: list[Path]) -> dict[str, Any]:
    """The first valid manifest of these checkpoints; empty if there is none."""
    for checkpoint in checkpoints:
        with contextlib.suppress(OSError, ValueError):
            return read_manifest(checkpoint)
    return {}


def _mode_in_summary(folder: Path) -> str | None:
    """The mode of the program that has ended here; None if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return json.loads((folder / SUMMARY).read_text()).get("mode")
    return None
