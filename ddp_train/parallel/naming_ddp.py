"""torch's DDP, its arguments and hooks, with an error that names the parameters without a
gradient."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_train.distributed.process_group import ranks
from ddp_train.errors import ConfigError, ModelError
from ddp_train.text import counted

BUCKET_MB = {"large": 125, "one": 2**20}
"""The most that a bucket holds; with `default` DDP decides. An H100 sends 125 MiB to another in 0.5
ms."""
SEVERAL_BUCKETS = (
    "strategy.comm_hook=powersgd: over gloo all gradients must be in one bucket: torch's hook would"
    " mix up several, or hang; leave out strategy.bucket_cap_mb and bucket_cap_mb_list, or use"
    " strategy.comm_hook=fp16"
)


class NamingDdp(nn.parallel.DistributedDataParallel):
    """torch's, which names parameters by their numbers."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """Raises ModelError for parameters of lazy layers. options: of torch's DDP, by torch's
        names."""
        trained = list(requiring_grad(module))
        super().__init__(module, **options)
        self.trained = trained

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Raises ModelError if parameters had no gradient in the last step."""
        try:
            return super().forward(*inputs, **keywords)
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if not found:
                raise
            raise without_gradient(
                [self.trained[int(number)] for number in found[1].split()]
            ) from error


def requiring_grad(module: nn.Module) -> dict[str, nn.Parameter]:
    """Those that want a gradient, by name. Raises ModelError for lazy layers, whose weights each
    process would draw by itself, in its first forward pass."""
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    if lazy := [
        name.removeprefix("model.") for name, one in trained.items() if nn.parameter.is_lazy(one)
    ]:
        raise ModelError(
            f"{counted(len(lazy), 'parameter')} without a shape, of lazy layers:"
            f" {', '.join(lazy[:5])}",
            "give these layers their number of inputs, or call the model once where it is made",
        )
    return trained


def without_gradient(parameters: list[str]) -> ModelError:
    """The error for parameters, by their names in ModelWithTask, that get none."""
    names = [name.removeprefix("model.") for name in parameters]
    some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return ModelError(
        f"the loss does not depend on {counted(len(names), 'parameter')}: {some}",
        "use them in forward, remove or freeze them, or add strategy.find_unused_parameters=true",
    )


def ddp_arguments(
    device: str,
    broadcast_buffers: bool = True,
    bucket_cap_mb_list: list[float] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The arguments of torch's DDP, under the names that the installed torch has for them.

    A process that is alone broadcasts no buffers: DDP would send them to itself and copy each back
    in every step, 363 copies for densenet121.
    """
    known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    renamed = "forward_sync_buffers" in known  # in torch 2.13
    arguments = {
        "device_ids": [torch.device(device)] if device.startswith("cuda") else None,
        "forward_sync_buffers" if renamed else "broadcast_buffers": (
            broadcast_buffers and ranks() > 1
        ),
        **options,
    }
    if bucket_cap_mb_list is not None:
        arguments["bucket_cap_mb_list"] = bucket_cap_mb_list
    return arguments


def with_bucket_size(options: dict[str, Any], buckets: str, comm_hook: str) -> dict[str, Any]:
    """A copy of DDP's options, by torch's names. buckets: default, or a key of `BUCKET_MB`, if no
    size is among them. PowerSGD over gloo needs a single bucket."""
    if options.get("bucket_cap_mb") or options.get("bucket_cap_mb_list"):
        return {**options}
    if comm_hook == "powersgd" and dist.get_backend() == "gloo":
        buckets = "one"
    return options | {"bucket_cap_mb": None if buckets == "default" else BUCKET_MB[buckets]}


def exchanged_at_once(wrapped: nn.parallel.DistributedDataParallel) -> bool:
    """Whether no bucket is full before the backward pass ends. There is one for each number
    type."""
    caps = getattr(wrapped, "bucket_bytes_cap_list", None) or [wrapped.bucket_bytes_cap]
    return sum(one.nbytes for one in wrapped.module.parameters() if one.requires_grad) <= min(caps)


def in_one_bucket(wrapped: nn.parallel.DistributedDataParallel) -> bool:
    types = {one.dtype for one in wrapped.module.parameters() if one.requires_grad}
    return len(types) == 1 and exchanged_at_once(wrapped)


def register_comm_hook(
    wrapped: nn.parallel.DistributedDataParallel, name: str, powersgd_rank: int
) -> None:
    """Raises ConfigError for PowerSGD over gloo with several buckets. Its hook exchanges the
    factors of a bucket in gloo's threads and waits there, in an order that each rank decides for
    itself: with two buckets three processes were killed by SIGABRT, with more they waited for each
    other (torch 2.15).
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "bf16":
        wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif name == "powersgd":  # arXiv:1905.13727; plain all-reduce in 10 passes first
        if dist.get_backend() == "gloo" and not in_one_bucket(wrapped):
            raise ConfigError([SEVERAL_BUCKETS])
        state = powerSGD_hook.PowerSGDState(None, powersgd_rank, start_powerSGD_iter=10)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
