"""The reading of YAML files that a run has written itself."""

from __future__ import annotations

from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""With libyaml, which PyYAML's wheels have, ten times as fast."""


def load_plain_yaml(text: str) -> Any:
    """The plain values of a file. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=LOADER)
