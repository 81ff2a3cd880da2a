"""Learning rates as functions of the optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ddp_train.options.key import key
from ddp_train.options.schema import ScheduleConfig


def _final_factor() -> Any:
    return key(0.0, "learning rate of the last step, as a fraction of lr", at_least=0, at_most=1)


@dataclass
class ConstantConfig(ScheduleConfig):
    name: str = "constant"


@dataclass
class StepConfig(ScheduleConfig):
    name: str = "step"
    step_size: int = key(1000, "optimizer steps between two decays", at_least=1)
    gamma: float = key(0.1, "factor of each decay", above=0, at_most=1)


@dataclass
class CosineConfig(ScheduleConfig):
    name: str = "cosine"
    spans_the_run: ClassVar[bool] = True
    final_factor: float = _final_factor()


@dataclass
class PolynomialConfig(ScheduleConfig):
    name: str = "polynomial"
    spans_the_run: ClassVar[bool] = True
    power: float = key(2.0, "exponent of the decay", above=0)
    final_factor: float = _final_factor()


@dataclass
class OneCycleConfig(ScheduleConfig):
    """Leslie Smith's 1cycle (arXiv:1708.07120): up from lr / div_factor to lr, then down to almost
    nothing."""

    name: str = "one_cycle"
    spans_the_run: ClassVar[bool] = True
    pct_start: float = key(
        0.3, "fraction of the steps in which the learning rate goes up", above=0, below=1
    )
    div_factor: float = key(25.0, "lr divided by the first learning rate", at_least=1)
    final_div_factor: float = key(1e4, "first learning rate divided by the last", at_least=1)


@dataclass
class WsdConfig(ScheduleConfig):
    """Warm-up, stable, decay (arXiv:2404.06395): lr until the last part of the run, then down."""

    name: str = "wsd"
    spans_the_run: ClassVar[bool] = True
    decay_part: float = key(
        0.2,
        "fraction of the steps after the warm-up, at the end of the run, in which the learning"
        " rate falls",
        above=0,
        at_most=1,
    )
    decay: str = key(
        "linear",
        "how it falls; sqrt: 1 - sqrt(progress), arXiv:2405.18392",
        choices=("linear", "cosine", "sqrt"),
    )
    final_factor: float = _final_factor()
