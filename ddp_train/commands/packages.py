"""Are the packages there that every run imports? Looked for, not imported: 0.4 ms. Torch-free, and
free of them all."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from ddp_train.errors import ConfigError

NEEDED = (
    "torch",
    "hydra",
    "omegaconf",
    "pynvml",
    "numpy",
    "yaml",
    "rich",
    "safetensors",
    "threadpoolctl",
)
"""By the names that they are imported by."""
DISTRIBUTIONS = {"hydra": "hydra-core", "pynvml": "nvidia-ml-py", "yaml": "pyyaml"}
"""Those that pip knows by another name."""


def require_packages(folder: Path | None) -> None:
    """Where one is missing, as outside of .venv: says so and what to do, and exits with 2. folder:
    of launch.py; None: this package is installed."""
    missing = [name for name in NEEDED if not find_spec(name)]
    if not missing:
        return
    if folder is None:
        names = " ".join(DISTRIBUTIONS.get(name, name) for name in missing)
        print(f"ddp-train: {sys.executable} does not have {', '.join(missing)}", file=sys.stderr)
        print(f"  {sys.executable} -m pip install {names}", file=sys.stderr)
        sys.exit(ConfigError.exit_code)
    print(
        f"launch.py: {sys.executable} does not have {', '.join(missing)}. In {folder}, either",
        file=sys.stderr,
    )
    if (folder / ".venv/bin/activate").exists() and Path(sys.prefix).resolve() != (
        folder / ".venv"
    ).resolve():
        print("  source .venv/bin/activate    # then the same command again, or", file=sys.stderr)
    print(
        "  make train                   # sets up .venv, then trains the digits, or",
        file=sys.stderr,
    )
    print(
        f"  {sys.executable} -m pip install --constraint constraints.txt --editable .",
        file=sys.stderr,
    )
    sys.exit(ConfigError.exit_code)
