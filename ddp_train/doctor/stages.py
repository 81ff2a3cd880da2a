"""What a probe does, in words and in order: for the process that runs it and for the one that watches. Torch-free."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

IMPORT, MEET, COMPUTE, CONNECT, EXCHANGE, MEASURE, LEAVE, DONE = (
    "import torch", "meet", "compute", "connect", "exchange", "all-reduce", "leave", "done"
)  # fmt: skip
STAGES = (IMPORT, MEET, COMPUTE, CONNECT, EXCHANGE, MEASURE, LEAVE, DONE)
"""`meet` waits for all processes, `connect` opens the process group."""
MEASURED_SIZES, WORDS_OF_A_SIZE = 3, 3
"""Of the all-reduce, and how often a process says so while it measures one."""
NEIGHBOURS = 8
"""Each process sends to so many that follow it, at most: with eight GPUs a host to all others there and to the next."""


@dataclass(frozen=True)
class Spec:
    """What a probe is told on its command line."""

    device: str
    """cpu, cuda:0, ..."""
    backend: str
    timeout_seconds: float
    """Whoever watches has lost patience before: this only ends a probe that nobody watches."""
    run_id: str
    """Of this try: several may use one store."""

    def argv(self) -> list[str]:
        """The command line."""
        return [sys.executable, "-P", "-m", "ddp_train.doctor.probe", json.dumps(asdict(self))]
