"""The option strategy=ddp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ddp_train.options.key import key
from ddp_train.options.problem import Problem
from ddp_train.options.schema import RequestedRun, StrategyConfig
from ddp_train.text import shown


@dataclass
class DdpConfig(StrategyConfig):
    """DistributedDataParallel: one process per GPU. Keys named as in torch mean what they mean in
    torch."""

    name: str = "ddp"
    implementation: ClassVar[str] = "ddp_train.parallel.strategy:DistributedDataParallel"
    has_process_group: ClassVar[bool] = True
    has_buckets: ClassVar[bool] = True
    sync_bn: bool = key(False, "batch norm statistics over the samples of all processes")
    bucket_cap_mb: float | None = key(
        None, "size of a gradient bucket in MiB; null: torch's default", above=0
    )
    bucket_cap_mb_list: list[float] | None = key(
        None, "size of each gradient bucket in MiB", above=0
    )
    gradient_as_bucket_view: bool = key(
        True, "gradients are views into the buckets, which saves a copy of each"
    )
    static_graph: bool = key(
        False, "promise that the autograd graph is the same in every iteration"
    )
    broadcast_buffers: bool = key(
        True, "send rank 0's buffers to all ranks before every forward pass"
    )
    find_unused_parameters: bool = key(
        False, "allow parameters that get no gradient in some iterations"
    )
    skip_all_reduce_unused_params: bool = key(
        False, "do not exchange gradients of parameters that no rank used"
    )
    init_sync: bool = key(True, "verify shapes and send rank 0's weights when DDP is built")
    comm_hook: str = key(
        "none",
        "compress gradients before the exchange",
        choices=("none", "fp16", "bf16", "powersgd"),
    )
    powersgd_rank: int = key(1, "rank of the approximation of comm_hook=powersgd", at_least=1)

    def sizes_of_buckets(self, asked: str = "default") -> dict[str, Any]:
        given = {
            "strategy.bucket_cap_mb_list": self.bucket_cap_mb_list,
            "strategy.bucket_cap_mb": self.bucket_cap_mb,
            "tuning.buckets": asked,
        }
        unset = (None, "auto", "default")
        return {name: value for name, value in given.items() if value not in unset}

    @property
    def is_plain(self) -> bool:
        """True if DDP only averages gradients: a process that is alone needs none then."""
        return self.comm_hook == "none" and not (self.find_unused_parameters or self.static_graph)

    def problems(self, run: RequestedRun) -> Iterator[Problem]:
        steps = run.config.train.accumulation_steps
        sizes = self.sizes_of_buckets(run.asked.tuning.buckets)
        if len(sizes) > 1:
            first, second, *_ = [f"{name}={shown(value)}" for name, value in sizes.items()]
            yield Problem(first, f"contradicts {second}", "give one of them")
        if self.skip_all_reduce_unused_params and not self.find_unused_parameters:
            yield Problem(
                "strategy.skip_all_reduce_unused_params=true",
                "needs strategy.find_unused_parameters=true",
                "add it, or leave strategy.skip_all_reduce_unused_params out",
            )
        if self.static_graph and self.find_unused_parameters:
            yield Problem(
                "strategy.find_unused_parameters=true",
                "strategy.static_graph=true finds them already, in its first step",
                "give one of them",
            )
        if self.static_graph and steps > 1:
            yield Problem(
                "strategy.static_graph=true",
                f"DDP would fail, since with train.accumulation_steps={steps} some passes"
                " exchange no gradients",
                "use strategy.static_graph=false, or train.accumulation_steps=1",
            )
        if self.comm_hook != "powersgd" and self.powersgd_rank != 1:
            yield Problem(
                f"strategy.powersgd_rank={self.powersgd_rank}",
                "has an effect only with strategy.comm_hook=powersgd",
                "add strategy.comm_hook=powersgd, or leave strategy.powersgd_rank out",
            )
        if self.comm_hook == "powersgd" and self.static_graph:
            yield Problem(
                "strategy.comm_hook=powersgd",
                "cannot be combined with strategy.static_graph=true, which rebuilds the buckets",
                "use strategy.static_graph=false",
            )
        if self.comm_hook != "none" and run.config.tuning.precision == "fp64":
            yield Problem(
                f"strategy.comm_hook={self.comm_hook}",
                "would undo tuning.precision=fp64",
                "give one of them",
            )

    def notices(self, run: RequestedRun) -> Iterator[str]:
        config = run.config
        most_processes = max(config.process_counts, default=config.process_count)
        if most_processes > 1 or not self.is_plain:
            return
        for name, default in vars(DdpConfig()).items():
            value = getattr(self, name)
            if name not in ("name", "sync_bn") and value is not None and value != default:
                yield (
                    f"strategy.{name}={shown(value)} has no effect: one process exchanges nothing"
                )
