"""The option strategy=ddp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ddp_train.options.key import key
from ddp_train.options.strategy import StrategyConfig
from ddp_train.text import shown


@dataclass
class DdpConfig(StrategyConfig):
    """DistributedDataParallel: one process per GPU. Keys named as in torch mean what they mean in
    torch."""

    name: str = "ddp"
    has_process_group: ClassVar[bool] = True
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
    static_graph: bool = key(False, "promise that the graph is the same in every iteration")
    broadcast_buffers: bool = key(
        True, "send rank 0's buffers to all ranks before every forward pass"
    )
    find_unused_parameters: bool = key(
        False, "allow parameters that get no gradient in some iterations"
    )
    skip_all_reduce_unused_params: bool = key(False, "do not reduce parameters that no rank used")
    init_sync: bool = key(True, "verify shapes and send rank 0's weights when DDP is built")
    comm_hook: str = key(
        "none",
        "compress gradients before the exchange",
        choices=("none", "fp16", "bf16", "powersgd"),
    )
    powersgd_rank: int = key(1, "rank of the approximation of comm_hook=powersgd", at_least=1)

    def sizes_of_buckets(self, asked: str = "default") -> dict[str, Any]:
        cap = self.bucket_cap_mb
        caps = self.bucket_cap_mb_list
        given = {
            "strategy.bucket_cap_mb_list": caps,
            "strategy.bucket_cap_mb": cap,
            "tuning.buckets": asked,
        }
        return {
            name: value for name, value in given.items() if value not in (None, "auto", "default")
        }

    @property
    def is_plain(self) -> bool:
        """Whether DDP does no more than average gradients: a process that is alone needs none
        then."""
        return self.comm_hook == "none" and not (self.find_unused_parameters or self.static_graph)

    def notices(self, processes: int) -> dict[str, bool]:
        applies = {
            name: value for name, value in vars(self).items() if name not in ("name", "sync_bn")
        }
        return {
            f"strategy.{name}={shown(value)} has no effect: one process exchanges nothing": value
            != default
            for name, default in vars(DdpConfig()).items()
            if processes == 1 and self.is_plain and (value := applies.get(name)) is not None
        }
