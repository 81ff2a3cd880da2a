"""The strategies of one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddp_train.options.strategy import StrategyConfig


@dataclass
class SingleConfig(StrategyConfig):
    """One process, one device."""

    name: str = "single"


@dataclass
class DpConfig(StrategyConfig):
    """torch.nn.DataParallel: one process, all visible GPUs."""

    name: str = "dp"
    spreads_over_gpus: ClassVar[bool] = True
    capture_blocker: ClassVar[str] = "DataParallel runs in several threads"
