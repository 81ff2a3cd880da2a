"""Files that hold a JSON object, or one on each line. Torch-free."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def parse_object(text: bytes | str) -> dict[str, Any] | None:
    """A JSON object; None if the text is cut off, damaged or something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        return value
    return None


def parse_objects(text: bytes) -> list[dict[str, Any]]:
    """The objects of a text, one on each line, without damaged lines."""
    values = map(parse_object, text.splitlines())
    return [value for value in values if value is not None]


def read_object(path: Path) -> dict[str, Any]:
    """The object that a file is; empty without a file, or if it is cut off: the disk was full.

    Raises OSError if a file that is there cannot be read.
    """
    return parse_object(read_bytes(path)) or {}


def read_objects(path: Path, begin: int = 0) -> list[dict[str, Any]]:
    """The objects of a file, one on each line, without damaged lines.

    begin: the place of the first line, in bytes.
    """
    return parse_objects(read_bytes(path, begin))


def read_bytes(path: Path, begin: int = 0) -> bytes:
    """The content of a file from a place on; nothing without a file.

    A device is no file: it has no end.

    begin: in bytes; of a negative number, as many bytes before the end.
    """
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        if begin >= 0:
            file.seek(begin)
        elif path.stat().st_size > -begin:
            file.seek(begin, os.SEEK_END)
        return file.read()


def finite_or_none(value: Any) -> Any:
    """A value as JSON has it: there is no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
