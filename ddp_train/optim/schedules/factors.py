"""Learning-rate schedules: functions of the optimizer step, without state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Factor = Callable[[int], float]
"""Optimizer step 0, 1, ... -> what the base learning rates are multiplied by."""


def build_schedule(name: str, total_steps: int, warmup_steps: int = 0, **arguments: Any) -> Factor:
    """The factor of the learning rate in optimizer step 0, 1, ... total_steps - 1.

    Warm-up is linear and reaches the base learning rate after its steps; the schedule proper runs
    over the steps after it. arguments: the keys of `schedule=NAME`.
    """
    main = _SCHEDULES[name](max(1, total_steps - warmup_steps), **arguments)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return linear_warmup(step, warmup_steps)
        return main(step - warmup_steps)

    return factor


def linear_warmup(step: int, warmup_steps: int) -> float:
    """The factor of a linear warm-up in optimizer step 0, 1, ...; 1 after it."""
    if step >= warmup_steps:
        return 1.0
    return (step + 1) / (warmup_steps + 1)


def _constant(steps: int) -> Factor:
    return lambda step: 1.0


def _step(steps: int, step_size: int, gamma: float) -> Factor:
    return lambda step: gamma ** (step // step_size)


def _cosine(steps: int, final_factor: float) -> Factor:
    """arXiv:1608.03983 without restarts; reaches final_factor one step after the last, as torch's
    does."""
    return lambda step: (
        final_factor + (1 - final_factor) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )


def _polynomial(steps: int, power: float, final_factor: float) -> Factor:
    return lambda step: final_factor + (1 - final_factor) * max(0.0, 1 - step / steps) ** power


def _one_cycle(steps: int, pct_start: float, div_factor: float, final_div_factor: float) -> Factor:
    """arXiv:1708.07120 with cosine flanks, as torch's OneCycleLR without the momentum cycle."""
    top = pct_start * steps - 1
    end = steps - 1
    first = 1 / div_factor
    last = first / final_div_factor

    def between(start: float, stop: float, progress: float) -> float:
        return stop + (start - stop) / 2 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))

    def factor(step: int) -> float:
        if step <= top:
            return between(first, 1, step / top if top > 0 else 1)
        return between(1, last, (step - top) / (end - top) if end > top else 1)

    return factor


_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""The shapes of a decay: progress from 0 to 1 -> the part of the rate that is left."""


def _wsd(steps: int, decay_part: float, decay: str, final_factor: float) -> Factor:
    """Warm-up, stable, decay (arXiv:2404.06395); `sqrt` is the decay of arXiv:2405.18392. It
    reaches final_factor one step after the last."""
    decay_steps = max(1, round(decay_part * steps))
    first = steps - decay_steps

    def factor(step: int) -> float:
        progress = min(max(step - first, 0) / decay_steps, 1.0)
        return final_factor + (1 - final_factor) * _DECAYS[decay](progress)

    return factor


_SCHEDULES: dict[str, Callable[..., Factor]] = {
    "constant": _constant,
    "step": _step,
    "cosine": _cosine,
    "polynomial": _polynomial,
    "one_cycle": _one_cycle,
    "wsd": _wsd,
}
