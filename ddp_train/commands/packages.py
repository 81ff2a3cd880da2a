"""The packages that every run imports. They are looked for and not imported, in 0.4 ms.

This module needs none of them.
"""

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
"""The names by which they are imported."""
DISTRIBUTIONS = {"hydra": "hydra-core", "pynvml": "nvidia-ml-py", "yaml": "pyyaml"}
"""The names by which pip knows some of them."""


def require_packages(checkout: Path | None) -> None:
    """Exit with 2 if a package is missing, as outside of .venv, and say what to do.

    checkout: the folder of launch.py; None: this package is installed.
    """
    missing = [name for name in NEEDED if not find_spec(name)]
    if not missing:
        return
    problem = f"{sys.executable} does not have {', '.join(missing)}"
    if checkout is None:
        distributions = [DISTRIBUTIONS.get(name, name) for name in missing]
        lines = [
            f"ddp-train: {problem}",
            f"  {sys.executable} -m pip install {' '.join(distributions)}",
        ]
    else:
        lines = [f"launch.py: {problem}. In {checkout}, either", *_remedies(checkout / ".venv")]
    for line in lines:
        print(line, file=sys.stderr)
    sys.exit(ConfigError.exit_code)


def _remedies(venv: Path) -> list[str]:
    remedies = [
        "  make train                   # sets up .venv, then trains the digits, or",
        f"  {sys.executable} -m pip install --constraint constraints.txt --editable .",
    ]
    is_active = Path(sys.prefix).resolve() == venv.resolve()
    if (venv / "bin/activate").exists() and not is_active:
        remedies.insert(0, "  source .venv/bin/activate    # then the same command again, or")
    return remedies
