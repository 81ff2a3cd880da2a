"""A range in place of a number of processes, `launch.nproc_per_node=2:8`, or of hosts,
`launch.nnodes=2:3`: with which numbers may a run continue?"""

from __future__ import annotations

from ddp_train.distributed.world import World
from ddp_train.hardware import Hardware
from ddp_train.options.key import Range, range_of
from ddp_train.options.schema import Config
from ddp_train.parallel.ordered.config import OrderedConfig

KEY = "launch.nproc_per_node"
HOSTS = "launch.nnodes"


def counts_of(asked: Range, config: Config, gpus: int | None, cpus: int) -> list[int]:
    """The numbers of a range, ascending. `strategy=ordered` goes without those that do not divide
    its virtual shards.

    gpus: None to train on the CPU.
    """
    high = asked.high or max(asked.low, cpus if gpus is None else gpus)
    if isinstance(config.strategy, OrderedConfig):
        shards = config.strategy.virtual_shards
    else:
        shards = 0
    return [count for count in range(asked.low, high + 1) if shards % count == 0]


def first_count(asked: Range, counts: list[int], gpus: int | None) -> int:
    """With how many a run starts: the largest for which there are devices. The smallest number that
    was asked for if there are too few, or none fits: `check` says so."""
    return max((count for count in counts if gpus is None or count <= gpus), default=asked.low)


def problems(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """What is wrong with a range that obeys its rule; nothing where the key is a number, or auto.
    Any number of it must be able to train the global batch."""
    value = asked.launch.nproc_per_node
    found = range_of(asked.launch.nproc_per_node)
    if found is None:
        return []
    named = f"{KEY}={value}"
    use = f"use one number, {KEY}={config.launch.nproc_per_node}"
    if world:
        return [
            f"{named}: torchrun decides how many there are, {world.local_size} here; leave it out"
        ]
    if int(config.launch.nnodes) > 1:
        return [
            f"{named}: the number changes on one host only, and {HOSTS}={asked.launch.nnodes};"
            f" {use}"
        ]
    if not config.strategy.has_process_group:
        name = config.strategy.name
        return [f"{named}: strategy={name} runs in one process; use strategy=ddp, or leave it out"]
    counts = counts_of(
        found, config, hardware.gpus if config.device == "cuda" else None, hardware.cpus
    )
    ends = [found.low, *([found.high] if found.high else [])]
    if isinstance(config.strategy, OrderedConfig):
        shards = config.strategy.virtual_shards
        wrong = [str(end) for end in ends if end not in counts]
        what = (
            f"strategy=ordered cannot divide {shards} virtual shards evenly among"
            f" {' or '.join(wrong)} processes"
        )
        if wrong:
            return [f"{named}: {what}; use powers of two up to {shards}"]
        return []
    batch = config.train.global_batch_size
    accumulation = config.train.accumulation_steps
    most = counts[-1]
    enough = batch // accumulation
    if most <= enough or config.data.batch_by == "tokens":
        return []
    first = max(found.low, enough + 1)
    wrong = f"{first} to {most} processes" if first < most else f"{most} processes"
    each = f" and {accumulation} accumulation steps each" if accumulation > 1 else ""
    better = f"{KEY}={found.low}:{enough}, or " if found.low <= enough else ""
    return [
        f"{named}: train.global_batch_size={batch} has no sample for each of {wrong}{each}; use"
        f" {better}train.global_batch_size={most * accumulation} or more"
    ]


def hosts_at_start(asked: int | str) -> int:
    """The most of a range: with fewer the run begins if the others do not come."""
    found = range_of(asked)
    return found.high or found.low if found else int(asked)


def problems_of_hosts(
    asked: Config, config: Config, hardware: Hardware, world: World | None
) -> list[str]:
    """What is wrong with a range of hosts that obeys its rule. Any number of them must be able to
    train the global batch. Under torchrun these were looked at before its agent was started, or it
    is the agent's own range."""
    found = range_of(asked.launch.nnodes)
    launch = config.launch
    if found is None or world:
        return []
    named = f"{HOSTS}={asked.launch.nnodes}"
    each = int(launch.nproc_per_node)
    high = found.high or found.low
    if not config.strategy.has_process_group:
        return [
            f"{named}: strategy={config.strategy.name} runs in one process; use strategy=ddp, or"
            " leave it out"
        ]
    if high == 1:
        return [f"{named}: is one host; use {HOSTS}=1"]
    found_wrong = []
    if not launch.max_restarts:
        why = "that a host was lost costs each of the others a restart"
        found_wrong.append(f"{named}: {why}; add launch.max_restarts=10")
    if isinstance(config.strategy, OrderedConfig):
        shards = config.strategy.virtual_shards
        wrong = [
            str(hosts * each) for hosts in range(found.low, high + 1) if shards % (hosts * each)
        ]
        what = (
            f"strategy=ordered cannot divide {shards} virtual shards evenly among"
            f" {' or '.join(wrong)} processes"
        )
        if wrong:
            return [*found_wrong, f"{named}: {what}; use numbers of hosts that can, as 1:2"]
        return found_wrong
    batch = config.train.global_batch_size
    most = high * each * config.train.accumulation_steps
    if most > batch and config.data.batch_by != "tokens":
        what = f"train.global_batch_size={batch} has no sample for each process of {high} hosts"
        found_wrong.append(f"{named}: {what}; use train.global_batch_size={most} or more")
    return found_wrong
