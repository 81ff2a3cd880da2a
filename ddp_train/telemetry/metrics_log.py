"""metrics.jsonl: a line for each logging interval and each evaluation. Torch-free."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from ddp_train.resilience.whole_files import size_limit, write_text
from ddp_train.telemetry.json_files import finite_or_none, parse_object, read_bytes

METRICS = "metrics.jsonl"
DAMAGED = METRICS + ".damaged"
Line = dict[str, Any]
"""`kind` (train, validation, test, resize), `step` and numbers."""
log = logging.getLogger(__name__)


class MetricsFile:
    """Writer of metrics.jsonl. Inactive on all ranks but one.

    A line that cannot be written is left out, with one warning for all; the next one is tried.
    """

    def __init__(self, run_dir: Path, active: bool, first_step: int) -> None:
        """Keep the lines up to a step.

        first_step: later lines are removed. A process that was lost wrote them, and they are
            written again.
        """
        self.path = run_dir / METRICS
        self.active = active
        self.has_warned = False
        self.kept: list[Line] = []
        """The lines that the file begins with."""
        self.listeners: list[Callable[[Line], None]] = []
        """Called with each line, whether it could be written or not."""
        if active and self.path.is_file():
            try:
                self._truncate(first_step)
            except OSError as error:
                self._warn(error)

    def _truncate(self, first_step: int) -> None:
        """Keep the lines up to `first_step`, and move damaged ones to a file of their own."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # a killed process left it half written
            lines.pop()
        damaged = []
        first_damaged = 0
        for number, text in enumerate(lines, start=1):
            line = parse_line(text)
            if line is None:
                damaged.append(text)
                first_damaged = first_damaged or number
            elif line["step"] <= first_step:
                self.kept.append(line)
        if damaged:
            aside = self.path.with_name(DAMAGED)
            with aside.open("ab") as file:
                file.writelines(damaged)
            log.warning(
                "%s: line %d is damaged; damaged lines were moved to %s",
                self.path,
                first_damaged,
                aside,
            )
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in self.kept))

    def has(self, kind: str, step: int) -> bool:
        """Whether the file began with a line of this kind and step."""
        return (kind, step) in self._began_with

    @cached_property
    def _began_with(self) -> set[tuple[str, int]]:
        return {(line["kind"], line["step"]) for line in self.kept}

    def write(self, **values: Any) -> None:
        if not self.active:
            return
        line = {name: finite_or_none(value) for name, value in values.items()}
        for listener in self.listeners:
            listener(line)
        try:
            self._append((json.dumps(line) + "\n").encode())
        except OSError as error:
            self._warn(error)

    def _append(self, line: bytes) -> None:
        """Append a whole line, or nothing.

        The file is opened for each line: others see it on a network file system once it is closed.
        """
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            written = os.write(file, line)
            if written < len(line):  # the disk became full within the line, or the file too long
                size = os.fstat(file).st_size
                os.ftruncate(file, size - written)
                cause = errno.EFBIG if size == size_limit() else errno.ENOSPC
                raise OSError(cause, os.strerror(cause))
        finally:
            os.close(file)

    def _warn(self, error: OSError) -> None:
        if not self.has_warned:
            self.has_warned = True
            log.warning("%s cannot be written: %s; training continues", self.path, error)


def parse_line(text: bytes) -> Line | None:
    """A line of the file; None if it is damaged."""
    line = parse_object(text)
    if line is None or type(line.get("step")) is not int or not isinstance(line.get("kind"), str):
        return None
    return line


def read_metrics(path: Path, begin: int = 0) -> list[Line]:
    """The lines that are whole.

    begin: see `read_bytes`.
    """
    return _parsed(read_bytes(path, begin).splitlines())


def read_thinned(path: Path, kind: str, most: int) -> list[Line]:
    """About `most` lines of one kind, spread evenly, and the last one."""
    # Chosen before they are parsed, which takes 10 us each.
    mark = f'"kind": "{kind}"'.encode()
    lines = [text for text in read_bytes(path).splitlines() if mark in text]
    stride = max(1, math.ceil(len(lines) / most))
    return _parsed([*lines[:-1:stride], *lines[-1:]])


def _parsed(texts: Iterable[bytes]) -> list[Line]:
    return [line for line in map(parse_line, texts) if line is not None]


def last_step(run_dir: Path) -> int:
    """The last step that has a line; 0 without one."""
    try:
        return max((line["step"] for line in read_metrics(run_dir / METRICS)), default=0)
    except OSError:
        return 0
