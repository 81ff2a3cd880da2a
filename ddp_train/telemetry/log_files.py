"""Log files of processes, and their standard streams. Torch-free."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

log = logging.getLogger(__name__)


class LogFile(logging.FileHandler):
    """A log whose disk may be full: reported once on the terminal, not by a traceback per line."""

    is_lost = False

    def handleError(self, record: logging.LogRecord) -> None:
        if self.is_lost:
            return
        self.is_lost = True  # before the warning, which comes by here too
        error = sys.exc_info()[1]
        log.warning("%s cannot be written: %s; training continues", self.baseFilename, error)


def start_logging(log_file: Path, rank: int, to_terminal: bool) -> None:
    """Send this process's log to a file, and what it prints too unless it may use the terminal."""
    handlers = log_handlers(log_file, rank, to_terminal)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)
    # The first convolution of grey images, [n, 1, 3, 3]: a stride in a dimension of size 1 means
    # nothing, and no byte is elsewhere.
    warnings.filterwarnings(
        "ignore", r"(?s)Grad strides do not match bucket view strides.*sizes\(\) = \[\d+, 1, "
    )
    if not to_terminal:
        redirect_streams(log_file)


def log_handlers(log_file: Path, rank: int, to_terminal: bool) -> list[logging.Handler]:
    """The handlers for a process's log file and, if it may use that, for the terminal."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    file_handler = LogFile(log_file)
    file_format = f"%(asctime)s rank {rank} %(levelname)s %(message)s"
    file_handler.setFormatter(logging.Formatter(file_format))
    if to_terminal:
        return [file_handler, _terminal_handler()]
    return [file_handler]


def _terminal_handler() -> logging.Handler:
    """Warnings of this package: failures have their own report, and torch's are for the log."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    handler.addFilter(
        lambda record: record.levelno == logging.WARNING and record.name.startswith("ddp_train")
    )
    return handler


def redirect_streams(log_file: Path) -> None:
    """Send what this process prints to a file that exists."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log_file, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):  # below Python: C libraries print too
        os.dup2(file, stream)
