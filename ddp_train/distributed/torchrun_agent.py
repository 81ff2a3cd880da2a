"""torchrun's agent without the traceback that it prints after each failure of a worker and each
stop.

The worker, or our launcher, has told the user what happened; torchrun's own log lines, with the
exit code or the signal of the process, stay. To be run as a script with torchrun's arguments.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except (ChildFailedError, SignalException):
        sys.exit(1)
