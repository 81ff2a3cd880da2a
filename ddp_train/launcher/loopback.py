"""A check of the interface by which the processes of this host meet, 127.0.0.1. Torch-free."""

from __future__ import annotations

import socket
from pathlib import Path

from ddp_train.errors import PeerError
from ddp_train.launcher.workload import Workload
from ddp_train.options.schema import Config
from ddp_train.resilience import failure_report
from ddp_train.resilience.failure import Failure

CONNECT_SECONDS = 5.0


def report_if_down(config: Config, workload: Workload) -> int:
    """Report a loopback interface that is down: the processes would try to connect for minutes.

    Returns the exit code; 0 if the interface is up, which takes under 1 ms to find out.
    """
    if not config.strategy.has_process_group:
        return 0
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), CONNECT_SECONDS),
        ):
            return 0
    except OSError as error:
        failure = Failure(
            kind=PeerError.kind,
            rank=None,
            host=socket.gethostname(),
            step=None,
            phase="start",
            detail=f"the loopback interface is down: 127.0.0.1: {error.strerror}",
            remedy="ip link set lo up",
            log="",
            exit_code=PeerError.exit_code,
        )
        failure_report.report(Path(str(config.run_dir)), failure, workload.facts(config))
        return failure.exit_code
