"""A picture of a GPU's memory, taken at the moment when an allocation fails."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

VIEWER = "https://pytorch.org/memory_viz"
ENTRIES = 100_000
"""Size of the history: the newest allocations and their Python stacks."""
log = logging.getLogger(__name__)


def snapshot_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "memory" / f"rank_{rank}.pickle"


def take_when_out_of_memory(path: Path, history: bool) -> None:
    """Write `path` at each allocation on a GPU that fails, so that the last one stays: the error
    that ends a run. Its traceback holds tensors, but by the time it is reported others are gone.

    history: also keep the stacks of allocations from now on, which costs time at each; without it a
        viewer shows sizes and places of what is allocated, and what is cached but too scattered to
        be of use.
    """
    if history:
        torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")

    def take(device: int, size: int, total: int, free: int) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        except Exception as error:  # noqa: BLE001  that the memory is full matters more
            log.warning("%s cannot be written: %s", path, error)

    torch._C._cuda_attach_out_of_memory_observer(take)  # pyright: ignore[reportAttributeAccessIssue]  no stub has it
