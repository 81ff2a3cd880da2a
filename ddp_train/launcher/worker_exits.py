"""How the workers of torchrun's agent on this host have ended. Torch-free.

torchrun's agent exits with 1 whatever its workers' codes are, so they write them to a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddp_train.distributed.agent import BEGUN, REPORTED


@dataclass(frozen=True)
class WorkerExits:
    """The content of the exit-code file."""

    restarts: int
    """The restarts of the agent. It starts workers anew without counting when hosts join."""
    codes: list[int]
    """Exit codes of the workers that it started last, as far as they have ended."""
    has_reported: bool
    """Whether one of them has reported a failure."""


def read_exits(exit_code_file: Path) -> WorkerExits:
    """Read the file that workers append to, see `agent.write_exit_code`."""
    restarts = 0
    entries: dict[str, list[str]] = {}
    """The entries of each local rank since it was started last."""
    for line in exit_code_file.read_text().splitlines():
        attempt, local_rank, entry = line.split()
        restarts = max(restarts, int(attempt))
        if entry == BEGUN:
            entries[local_rank] = []
        else:
            entries.setdefault(local_rank, []).append(entry)
    all_entries = [entry for entries_of_rank in entries.values() for entry in entries_of_rank]
    codes = [int(entry) for entry in all_entries if entry != REPORTED]
    return WorkerExits(restarts, codes, REPORTED in all_entries)
