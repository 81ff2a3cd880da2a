"""torchrun's agent without what it prints although all is told, or well.

That is the traceback after each failure of a worker and each stop: the worker, or our launcher, has
told the user what happened. And the C++ stack of an agent that finds the store gone at the end,
since the host that served it was done first. torchrun's own log lines, with the exit code or the
signal of the process, stay. To be run as a script with torchrun's arguments.
"""

# ruff: noqa: E402  torch reads the variable when it is imported
from __future__ import annotations

import logging
import os
import sys

LEVEL = "TORCH_CPP_LOG_LEVEL"
"""The level from which on torch's C++ code prints messages."""
is_quiet = __name__ == "__main__" and LEVEL not in os.environ
if is_quiet:
    os.environ[LEVEL] = "ERROR"

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main

if is_quiet:
    del os.environ[LEVEL]  # workers say all


def _is_no_late_end(record: logging.LogRecord) -> bool:
    return "has failed to shutdown the rendezvous" not in record.getMessage()


if __name__ == "__main__":
    dynamic_rendezvous.logger.addFilter(_is_no_late_end)
    try:
        main()
    except (ChildFailedError, SignalException):
        sys.exit(1)
