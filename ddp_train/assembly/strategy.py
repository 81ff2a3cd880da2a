"""The strategy that a config names."""

from __future__ import annotations

from ddp_train.assembly.arguments import arguments_of
from ddp_train.distributed.world import World
from ddp_train.options.registry import implementation_of
from ddp_train.options.schema import Config
from ddp_train.parallel.strategy import Single, Strategy


def build_strategy(config: Config, world: World, device: str) -> Strategy:
    """The one strategy of the run."""
    section = config.strategy
    if world.size == 1 and section.is_plain:
        # DDP would copy each gradient into a bucket, by a kernel of its own, that nobody reads.
        return Single(device, sync_bn=section.sync_bn, needs_all_gradients=True)
    arguments = arguments_of(section)
    if section.fixes_bits:
        arguments["seed"] = config.seed
    if section.has_buckets:
        # On a GPU the bits of a gradient's norm depend on its place in its bucket.
        bits_depend_on_buckets = world.size > 2 or device.startswith("cuda")
        arguments["fixed_buckets"] = bool(config.deterministic) and bits_depend_on_buckets
        arguments["buckets"] = config.tuning.buckets
    return implementation_of(section.implementation)(device, **arguments)
