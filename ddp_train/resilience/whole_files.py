"""Files that a reader finds as they were or as they are now, never half written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replaces a file, or makes it. Raises OSError, for one if the disk is full, and leaves nothing
    beside it then."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, values: dict[str, Any]) -> None:
    """As `write_text`. Numbers that are not finite become null, since JSON has none."""
    write_text(path, json.dumps(_finite(values), indent=1) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
