"""Numbers of processes and hosts, of which a range may be asked for.

`launch.nproc_per_node=2:8`, `launch.nnodes=2:3`: the numbers with which a run may continue.
"""

from __future__ import annotations

from ddp_train.hardware import Hardware
from ddp_train.options.key import Range, range_of
from ddp_train.options.schema import Config
from ddp_train.options.sections import LaunchConfig

PROCESSES = "launch.nproc_per_node"
HOSTS = "launch.nnodes"


def counts_of(asked: Range, config: Config, hardware: Hardware) -> list[int]:
    """The numbers of a range among which the strategy can divide a step, ascending."""
    high = asked.high
    if high is None:
        devices = hardware.gpus if config.device == "cuda" else hardware.cpus
        high = max(asked.low, devices)
    counts = range(asked.low, high + 1)
    return [count for count in counts if config.strategy.can_run_on(count)]


def first_count(asked: Range, counts: list[int], config: Config, hardware: Hardware) -> int:
    """The number with which a run starts: the largest for which there are devices.

    The smallest number that was asked for if there are too few devices, or no number fits; `check`
    reports that.
    """
    if config.device == "cuda":
        counts = [count for count in counts if count <= hardware.gpus]
    return max(counts, default=asked.low)


def hosts_at_start(asked: int | str) -> int:
    """The most hosts of a range; the run begins with fewer if the others do not come."""
    span = range_of(asked)
    if span is None:
        return int(asked)
    return span.high or span.low


def cores_each(launch: LaunchConfig, hardware: Hardware) -> int:
    """The cores of this host for each of its processes."""
    # There are 0 processes where a GPU is asked for and there is none.
    return hardware.cpus // max(1, int(launch.nproc_per_node))
