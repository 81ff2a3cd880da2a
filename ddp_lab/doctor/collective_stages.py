"""The stages of a collective test and its command line, shared by the test process and its runner.
Torch-free."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum

NUM_SIZES = 3
"""Message sizes that the all-reduce is measured with."""
REPORTS_PER_SIZE = 3
"""Progress lines that a rank prints for each of them."""
NEIGHBOURS = 8
"""Each rank sends to at most this many following ranks: with eight GPUs a host, to all others there
and to the next host."""


class Stage(StrEnum):
    """The stages of a test, in the order in which every rank goes through them."""

    IMPORT = "import torch"
    RENDEZVOUS = "rendezvous"
    """Waits until all processes are there."""
    COMPUTE = "compute"
    CONNECT = "connect"
    """Opens the process group."""
    EXCHANGE = "exchange"
    MEASURE = "all-reduce"
    SHUT_DOWN = "shut down"
    DONE = "done"


@dataclass(frozen=True)
class CollectiveTestSpec:
    """The arguments of one test process, passed as JSON on its command line."""

    device: str
    """cpu, cuda:0, ..."""
    backend: str
    timeout_seconds: float
    """Longer than the runner waits: it only ends a test process whose runner is gone."""
    run_id: str
    """Prefix in the store, which several tests may share."""

    def argv(self) -> list[str]:
        """The command line of the test process."""
        return [
            sys.executable,
            "-P",
            "-m",
            "ddp_lab.doctor.collective_test",
            json.dumps(asdict(self)),
        ]
