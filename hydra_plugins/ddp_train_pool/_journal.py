"""The journal of a study of Optuna: one process writes it, and a full disk ends no sweep."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend

from hydra_plugins.ddp_train_pool._devices import PoolError

log = logging.getLogger(__name__)
NAME_ANOTHER = "use a new file: hydra.sweeper.storage=FILE"
LINE_START = b'{"op_code"'
"""The beginning of each line of Optuna's journal."""


class Journal(BaseJournalBackend):
    """The file of Optuna's journal storage, locked by one process.

    Half a line, of a process that was killed, is removed. Lines for which there is no room on the
    disk wait for the next ones.
    """

    def __init__(self, path: Path) -> None:
        """Open and lock the file.

        Raises PoolError if another process has it, OSError, and ValueError if it is not a journal.
        """
        self.path = path
        self.was_warned = False
        self.file = path.open("a+b", buffering=0)
        try:
            # not inherited by the jobs, as a lock of flock would be
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self.file.close()
            raise PoolError(
                f"{path}: another sweep is using this study; wait until that sweep ends, or"
                f" {NAME_ANOTHER}"
            ) from None
        self.file.seek(0)
        *lines, half = self.file.read().split(b"\n")
        is_journal = all(line.startswith(LINE_START) for line in lines)
        if not is_journal or not half.startswith(LINE_START[: len(half)]):
            # a file of the user, which stays as it is
            raise ValueError("it has lines that Optuna did not write")
        self.logs: list[dict[str, Any]] = [json.loads(line) for line in lines]
        if half:
            self.file.truncate(sum(len(line) + 1 for line in lines))
        self.waiting: list[dict[str, Any]] = []

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self.logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        logs = json.loads(json.dumps(logs))  # as they are read again
        self.logs += logs
        self.waiting += logs
        lines = [json.dumps(entry, separators=(",", ":")) + "\n" for entry in self.waiting]
        try:
            self._write("".join(lines).encode())
            self.waiting = []
        except OSError as error:
            if not self.was_warned:
                self.was_warned = True
                log.warning(
                    "%s cannot be written: %s; writing is tried again with the next result",
                    self.path,
                    error,
                )

    def _write(self, content: bytes) -> None:
        """Write all or nothing. Raises OSError."""
        begin = self.file.seek(0, os.SEEK_END)
        try:
            while content:
                written = self.file.write(content)
                content = content[written:]
        except OSError:
            self.file.truncate(begin)
            raise
