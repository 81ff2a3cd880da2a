"""Who am I among the processes of this run. Read once from the environment, then passed on as one frozen value.

Torch-free, so that the entry can ask before it imports torch. The variables are torchrun's own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """One process among `size`. `rank` is always global; `local_rank` counts on this host."""

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
        """The device of this process: `cpu`, or `cuda:` and the local rank."""
        return f"cuda:{self.local_rank}" if kind == "cuda" else kind
