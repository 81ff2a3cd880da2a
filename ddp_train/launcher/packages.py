"""Are the packages there that every run imports? Looked for, not imported: 0.4 ms. Torch-free, and free of them all."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from ddp_train.errors import ConfigError

NEEDED = ("torch", "hydra", "omegaconf", "pynvml", "numpy", "yaml", "rich", "safetensors", "threadpoolctl")
"""By the names that they are imported by."""


def require_packages(folder: Path) -> None:
    """Where one is missing, as outside of .venv: says so and what to do, and exits with 2. folder: of launch.py."""
    missing = [name for name in NEEDED if not find_spec(name)]
    if not missing:
        return
    print(f"launch.py: {sys.executable} does not have {', '.join(missing)}. In {folder}, either", file=sys.stderr)
    if (folder / ".venv/bin/activate").exists() and Path(sys.prefix).resolve() != (folder / ".venv").resolve():
        print("  source .venv/bin/activate    # then the same command again, or", file=sys.stderr)
    print("  make train                   # sets up .venv, then trains the digits, or", file=sys.stderr)
    print(f"  {sys.executable} -m pip install --constraint constraints.txt --editable .", file=sys.stderr)
    sys.exit(ConfigError.exit_code)
