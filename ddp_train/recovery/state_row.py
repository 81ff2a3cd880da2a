"""What the plan of a run says of its state."""

from __future__ import annotations

from ddp_train.options.schema import Config
from ddp_train.recovery.pace import SHARE


def state_row(config: Config, is_kept: bool) -> str:
    """What a failure costs.

    is_kept: the processes were given memory that outlives them.
    """
    if config.host_range and config.device == "cpu" and config.process_count > 1:
        return "in memory outside the processes: a lost host costs no step"
    if not is_kept:
        return "in checkpoints only: a failure costs the steps since the last one"
    if config.device == "cpu":
        return "in memory outside the processes: a process that is killed or hangs costs no step"
    return (
        f"on the GPUs, outside the processes; copying it takes {SHARE:.1%} of the time: a process"
        " that is killed or hangs costs some tenths of a second"
    )
