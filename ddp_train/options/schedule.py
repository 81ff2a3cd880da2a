"""What every schedule answers."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_train.options.key import key


@dataclass
class ScheduleConfig:
    """Learning rates as functions of the optimizer step, which is the same on all ranks."""

    name: str = "constant"
    warmup_steps: int = key(0, "optimizer steps of linear warm-up from 0", at_least=0)
    warmup_epochs: float | None = key(
        None, "length of the warm-up in epochs, in place of warmup_steps", above=0
    )
    warmup_at_most: float | None = key(
        None,
        "largest part of the run for the warm-up, which is cut to it; null: one as long as the run"
        " is refused",
        above=0,
        below=1,
    )
