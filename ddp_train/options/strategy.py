"""What every strategy answers: how replicas are wrapped and gradients exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass
class StrategyConfig:
    """What every strategy answers."""

    name: str = "single"
    has_process_group: ClassVar[bool] = False
    """Whether several processes may run, connected by torch.distributed."""
    spreads_over_gpus: ClassVar[bool] = False
    """Whether one process uses all visible GPUs."""
    capture_blocker: ClassVar[str] = ""
    """Why its step cannot be captured as a CUDA graph."""
    sync_bn = find_unused_parameters = False
    comm_hook = "none"

    def sizes_of_buckets(self, asked: str = "default") -> dict[str, Any]:
        """Those that are given, by their keys. asked: tuning.buckets."""
        return {}

    def notices(self, processes: int) -> dict[str, bool]:
        """Of keys without effect, and whether they are asked for."""
        return {}
