"""Packages that are needed by some keys alone. None is imported: some take over a second."""

from __future__ import annotations

import importlib.util
import shlex
import sys


def is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # A folder of that name, as wandb and mlflow make them, is found as a package without a file.
    return spec is not None and spec.origin is not None


def how_to_install(requirement: str) -> str:
    """The remedy for a missing package, or for an extra of ours: `.[onnx]`."""
    return f"run {shlex.join([sys.executable, '-m', 'pip', 'install', requirement])}"
