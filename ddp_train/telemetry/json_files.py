"""Files that hold a JSON object, or one on each line. Torch-free."""

from __future__ import annotations

import json
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


def read_objects(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, without damaged lines; none if there is no file."""
    values = [parse_object(text) for text in read_byte_lines(path)]
    return [value for value in values if value is not None]


def read_byte_lines(path: Path, last_bytes: int | None = None) -> list[bytes]:
    """The lines of a file, as they are; none if there is no file.

    last_bytes: only those in the end of the file. The first of them may be cut off.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        if last_bytes is not None and path.stat().st_size > last_bytes:
            file.seek(-last_bytes, os.SEEK_END)
        return file.read().splitlines()


def read_object(path: Path) -> dict[str, Any]:
    """The object that a file is; empty if there is none, or it is cut off: the disk was full.

    Raises OSError if a file that is there cannot be read.
    """
    if not path.is_file():
        return {}
    return parse_object(path.read_bytes()) or {}
