"""The options strategy=single and strategy=dp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ddp_train.options.schema import RequestedRun, StrategyConfig


@dataclass
class SingleConfig(StrategyConfig):
    """One process, one device."""

    name: str = "single"
    implementation: ClassVar[str] = "ddp_train.parallel.strategy:Single"


@dataclass
class DpConfig(StrategyConfig):
    """torch.nn.DataParallel: one process, all visible GPUs."""

    name: str = "dp"
    implementation: ClassVar[str] = "ddp_train.parallel.strategy:DataParallel"
    spreads_over_gpus: ClassVar[bool] = True
    capture_blocker: ClassVar[str] = "DataParallel runs in several threads"

    def notices(self, run: RequestedRun) -> Iterator[str]:
        yield from super().notices(run)
        if run.config.device == "cpu":
            yield "strategy=dp has no GPUs to spread over: the model runs once, on the CPU"
