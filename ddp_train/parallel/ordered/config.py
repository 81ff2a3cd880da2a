"""The option strategy=ordered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddp_train.options.key import key
from ddp_train.options.strategy import StrategyConfig


@dataclass
class OrderedConfig(StrategyConfig):
    """Gradients summed in a fixed order: the same bits on any number of processes, slower than
    ddp."""

    name: str = "ordered"
    has_process_group: ClassVar[bool] = True
    capture_blocker: ClassVar[str] = "a captured step runs no Python"
    virtual_shards: int = key(
        8, "parts of a global batch; a power of two, and a multiple of the processes", at_least=1
    )
