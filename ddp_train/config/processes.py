"""A range in place of a number of processes or hosts: the numbers with which a run may continue.

`launch.nproc_per_node=2:8`, `launch.nnodes=2:3`
"""

from __future__ import annotations

from ddp_train.options.key import Range, range_of
from ddp_train.options.schema import Config

PROCESSES = "launch.nproc_per_node"
HOSTS = "launch.nnodes"


def counts_of(asked: Range, config: Config, gpus: int | None, cpus: int) -> list[int]:
    """The numbers of a range among which the strategy can divide a step, ascending.

    gpus: None to train on the CPU.
    """
    devices = cpus if gpus is None else gpus
    high = asked.high or max(asked.low, devices)
    counts = range(asked.low, high + 1)
    return [count for count in counts if config.strategy.can_run_on(count)]


def first_count(asked: Range, counts: list[int], gpus: int | None) -> int:
    """The number with which a run starts: the largest for which there are devices.

    The smallest number that was asked for if there are too few devices, or no number fits; `check`
    reports that.
    """
    possible = [count for count in counts if gpus is None or count <= gpus]
    return max(possible, default=asked.low)


def hosts_at_start(asked: int | str) -> int:
    """The most hosts of a range; the run begins with fewer if the others do not come."""
    span = range_of(asked)
    if span is None:
        return int(asked)
    return span.high or span.low
