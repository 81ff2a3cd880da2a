"""Learning-rate schedules: functions of the optimizer step, without state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ddp_train.config.schema import ScheduleConfig

Factor = Callable[[int], float]


def warmup_steps(config: ScheduleConfig, steps_per_epoch: int) -> int:
    """The optimizer steps of the warm-up, which may be given in epochs."""
    return config.warmup_steps if config.warmup_epochs is None else round(config.warmup_epochs * steps_per_epoch)


def build_schedule(config: ScheduleConfig, total_steps: int, steps_per_epoch: int) -> Factor:
    """The factor of the learning rate in optimizer step 0, 1, ... total_steps - 1: a function without state.

    Warm-up is linear and reaches the full rate after its steps; the schedule proper runs over the steps after it.
    """
    warmup = warmup_steps(config, steps_per_epoch)
    main = _SCHEDULES[config.name](config, max(1, total_steps - warmup))
    if not warmup:
        return main
    return lambda step: (step + 1) / (warmup + 1) if step < warmup else main(step - warmup)


def _step(config: Any, steps: int) -> Factor:
    return lambda step: config.gamma ** (step // config.step_size)


def _cosine(config: Any, steps: int) -> Factor:
    """arXiv:1608.03983 without restarts; reaches final_factor one step after the last, as torch's does."""
    return lambda step: config.final_factor + (1 - config.final_factor) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _polynomial(config: Any, steps: int) -> Factor:
    return lambda step: config.final_factor + (1 - config.final_factor) * (1 - step / steps) ** config.power


def _one_cycle(config: Any, steps: int) -> Factor:
    """arXiv:1708.07120 with cosine flanks, as torch's OneCycleLR without the momentum cycle."""
    top, end = config.pct_start * steps - 1, steps - 1
    first = 1 / config.div_factor
    last = first / config.final_div_factor

    def between(start: float, stop: float, micro_batch: float) -> float:
        return stop + (start - stop) / 2 * (1 + math.cos(math.pi * min(max(micro_batch, 0.0), 1.0)))

    def factor(step: int) -> float:
        if step <= top:
            return between(first, 1, step / top if top > 0 else 1)
        return between(1, last, (step - top) / (end - top) if end > top else 1)

    return factor


_SCHEDULES: dict[str, Callable[[Any, int], Factor]] = {
    "constant": lambda config, steps: lambda step: 1.0,
    "step": _step,
    "cosine": _cosine,
    "polynomial": _polynomial,
    "one_cycle": _one_cycle,
}
