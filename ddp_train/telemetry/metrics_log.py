"""metrics.jsonl: a line per logging interval and per evaluation."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_train.resilience.whole_files import write_text

METRICS = "metrics.jsonl"
DAMAGED = METRICS + ".damaged"
log = logging.getLogger(__name__)


class MetricsFile:
    """metrics.jsonl: a line per logging interval and per evaluation. Inactive on all ranks but one.

    What cannot be written is left out, with one warning; each later line is tried again.
    """

    def __init__(self, run_dir: Path, active: bool, first_step: int) -> None:
        """Lines of steps after `first_step` go: they are of a process that was lost, and come
        again."""
        self.path = run_dir / METRICS
        self.active = active
        self.warned = False
        self.kept: list[dict[str, Any]] = []
        """The lines that it begins with."""
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        """Called with each line, whether it could be written or not."""
        if active and self.path.is_file():
            try:
                self._take_up(first_step)
            except OSError as error:
                self._warn(error)

    def _take_up(self, first_step: int) -> None:
        """Keeps the lines up to `first_step`, and sets those aside that are none."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # a killed process left it half written
            lines.pop()
        parsed = [_parsed(line) for line in lines]
        self.kept = [line for line in parsed if line and line["step"] <= first_step]
        if damaged := [number for number, line in enumerate(parsed) if line is None]:
            aside = self.path.with_name(DAMAGED)
            with aside.open("ab") as file:
                file.writelines(lines[number] for number in damaged)
            log.warning(
                "%s: line %d is damaged; such lines are now in %s", self.path, damaged[0] + 1, aside
            )
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in self.kept))

    def has(self, kind: str, step: int) -> bool:
        """Whether it began with a line of this kind and step."""
        return any(line["kind"] == kind and line["step"] == step for line in self.kept)

    def write(self, **values: Any) -> None:
        if not self.active:
            return
        known = {
            key: None if isinstance(v, float) and not math.isfinite(v) else v
            for key, v in values.items()
        }
        for listener in self.listeners:
            listener(known)
        line = (json.dumps(known) + "\n").encode()  # JSON knows no NaN
        try:
            self._append(line)
        except OSError as error:
            self._warn(error)

    def _append(self, line: bytes) -> None:
        """Opens the file for each line: on a network file system others see what is in it when it
        is closed."""
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            written = os.write(file, line)
            if written < len(line):  # the disk became full within the line
                os.ftruncate(file, os.fstat(file).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)

    def _warn(self, error: OSError) -> None:
        if not self.warned:
            self.warned = True
            log.warning("%s cannot be written: %s; training continues", self.path, error)


def last_step(run_dir: Path) -> int:
    """The last one of which there is a line; 0 if there is none, or if it is no file but a device,
    which has no end."""
    file = run_dir / METRICS
    try:
        with file.open("rb") if file.is_file() else io.BytesIO() as lines:
            return max((line["step"] for line in map(_parsed, lines) if line), default=0)
    except OSError:
        return 0


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line of the file; None if it is damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = (
        isinstance(found, dict)
        and type(found.get("step")) is int
        and isinstance(found.get("kind"), str)
    )
    return found if whole else None
