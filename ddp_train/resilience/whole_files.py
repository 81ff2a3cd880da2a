"""Files that a reader finds as they were or as they are now, never half written."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
from pathlib import Path
from typing import Any

RAISE_LIMIT = "raise the limit before the start: ulimit -f unlimited"


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file, or create it.

    Raises OSError, for one if the disk is full, and leaves nothing beside it then.
    """
    part = part_of(path)
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def part_of(path: Path) -> Path:
    """The file in which the new content is written. A process that is killed leaves it behind."""
    return path.with_name(path.name + ".part")


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write JSON as `write_text` does. Numbers that are not finite become null: JSON has none."""
    write_text(path, json.dumps(_finite(values), indent=1) + "\n")


def create_json(path: Path, values: dict[str, Any]) -> None:
    """Create a file, as `write_json`. Raises FileExistsError if another process was faster."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        write_json(part, values)
        os.link(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def size_limit() -> int | None:
    """The most bytes that this process may write into one file, `ulimit -f`; None without a
    limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def is_over_limit(error: BaseException) -> bool:
    """Tell whether a write has failed since a file may be no longer, which a full disk is not."""
    return isinstance(error, OSError) and error.errno == errno.EFBIG


def shown_limit() -> str:
    """`files may have 102,400 bytes (ulimit -f)`."""
    return f"files may have at most {size_limit() or 0:,} bytes (ulimit -f)"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
