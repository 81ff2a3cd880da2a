"""Files of JSON lines to which several processes append, on several hosts too. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


@contextlib.contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file for this process alone. Raises OSError."""
    with path.open("ab+", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def add_line(file: BinaryIO, values: dict[str, Any]) -> None:
    """Add a line, whole or not at all. Raises OSError.

    A line that a killed process has left unfinished is ended first.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    line = json.dumps(values, allow_nan=False).encode() + b"\n"
    if size and file.read(1) != b"\n":
        line = b"\n" + line
    try:
        # a disk that becomes full takes a part of the line, and raises at the next write
        while line:
            written = file.write(line)
            line = line[written:]
    except OSError:
        file.truncate(size)
        raise
