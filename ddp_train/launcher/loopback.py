"""Can the processes of this host meet at 127.0.0.1? Without it they would try for minutes.
Torch-free."""

from __future__ import annotations

import socket
from pathlib import Path

from ddp_train.errors import PeerError
from ddp_train.launcher.workload import Workload
from ddp_train.options.schema import Config
from ddp_train.resilience import failure_report


def reported(config: Config, workload: Workload) -> int:
    """Reports an interface that is down, by one connection to itself, in under 1 ms. Returns its
    exit code, else 0."""
    if not config.strategy.has_process_group:
        return 0
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), 5.0),
        ):
            return 0
    except OSError as error:
        detail = f"the loopback interface is down: 127.0.0.1: {error.strerror}"
        code = PeerError.exit_code
        how = (None, "start", detail, "ip link set lo up", "", code)
        failure = failure_report.Failure(PeerError.kind, None, socket.gethostname(), *how)
        failure_report.report(Path(str(config.run_dir)), failure, workload.facts(config))
        return code
