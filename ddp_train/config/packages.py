"""Packages that are needed by some keys alone. None is imported: some take over a second."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2]
"""The checkout that this package is imported from, if it is not installed from a wheel."""


def is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # A folder of that name, as wandb and mlflow make them, is found as a package without a file.
    return spec is not None and spec.origin is not None


def how_to_install(requirement: str) -> str:
    """The remedy for a missing package."""
    return f"run {shlex.join([sys.executable, '-m', 'pip', 'install', requirement])}"


def how_to_install_extra(extra: str) -> str:
    """The remedy for the packages of an extra of ours, `onnx`. It works in any folder."""
    if (SOURCE / "pyproject.toml").exists():
        return how_to_install(f"{SOURCE}[{extra}]")
    return how_to_install(f"ddp-train[{extra}]")
