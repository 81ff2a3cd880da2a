"""Rank and world size of a process: read once from torchrun's environment variables, passed on as
one frozen value.

Torch-free, so that launch.py can use it before it imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """One of `size` processes. `rank` is global, `local_rank` is the rank on this host, `attempt`
    counts restarts."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    attempt: int = 0
    run_id: str = ""

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def is_local_leader(self) -> bool:
        return self.local_rank == 0

    @property
    def hosts(self) -> int:
        return self.size // self.local_size

    def device(self, kind: str) -> str:
        """The device of this process: `cpu`, or `cuda:LOCAL_RANK`."""
        return f"cuda:{self.local_rank}" if kind == "cuda" else kind
