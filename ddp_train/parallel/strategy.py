"""single, DataParallel and DDP behind one short protocol, so that the loop never asks which one it has."""

from __future__ import annotations

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddp_train.config.schema import DdpConfig
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.loader import Batch
from ddp_train.distributed.process_group import averaged_buffers
from ddp_train.parallel.sync_batch_norm import SyncBatchNorm, synchronised
from ddp_train.task import ModelWithLoss


class Strategy(Protocol):
    """What the rest of the package asks of a strategy."""

    def place(self, module: ModelWithLoss) -> ModelWithLoss:
        """The module on its device, converted as the strategy wants it. Before the optimizer is built."""
        ...

    def wrap(self, module: ModelWithLoss) -> nn.Module:
        """What the training step calls. Evaluation and checkpoints use the module itself: it has the plain names."""
        ...

    def sync_gradients(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch. Gradients are exchanged in that of the last micro-batch of a
        step; in those before it they only add up on this process."""
        ...

    def averaged(self, module: ModelWithLoss) -> AbstractContextManager[Tensor]:
        """Inside, buffers are the average over all processes: for an evaluation, or a checkpoint.

        Yields what each process had, and has again afterwards: [processes, n], float64.
        """
        ...


_NOTHING = contextlib.nullcontext()


class Single:
    """One process, one device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def place(self, module: ModelWithLoss) -> ModelWithLoss:
        return module.to(self.device)

    def wrap(self, module: ModelWithLoss) -> nn.Module:
        return module

    def sync_gradients(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        return _NOTHING

    def averaged(self, module: ModelWithLoss) -> AbstractContextManager[Tensor]:
        return contextlib.nullcontext(torch.empty(1, 0))


class DataParallel(Single):
    """One process, all visible GPUs: inputs are scattered, the model replicated, losses gathered in every step."""

    def wrap(self, module: ModelWithLoss) -> nn.Module:
        module.gathered = True
        return nn.DataParallel(module)


class DistributedDataParallel:
    """One process per device, gradients averaged while the backward pass still runs."""

    def __init__(self, device: str, config: DdpConfig) -> None:
        self.device, self.config = device, config
        self.sync_batch_norms: list[SyncBatchNorm] = []

    def place(self, module: ModelWithLoss) -> ModelWithLoss:
        if self.config.sync_bn:
            on_gpu = self.device.startswith("cuda")  # torch's has kernels for GPUs, and refuses CPU tensors
            module.model = (nn.SyncBatchNorm.convert_sync_batchnorm if on_gpu else synchronised)(module.model)
        return module.to(self.device)

    def wrap(self, module: ModelWithLoss) -> nn.Module:
        self.sync_batch_norms = [layer for layer in module.modules() if isinstance(layer, SyncBatchNorm)]
        self.wrapped = nn.parallel.DistributedDataParallel(module, **ddp_arguments(self.config, self.device))
        _register_comm_hook(self.wrapped, self.config)
        return self.wrapped

    def sync_gradients(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        for layer in self.sync_batch_norms:
            layer.counts = micro_batch.num_real > 0
        return _NOTHING if micro_batch.is_last else self.wrapped.no_sync()

    def averaged(self, module: ModelWithLoss) -> AbstractContextManager[Tensor]:
        return averaged_buffers(module)


def warm_up_ddp_buckets(wrapped: nn.Module, batch: Batch) -> None:
    """Two forward and backward passes that leave nothing behind but the final layout of DDP's buckets.

    DDP lays out its buckets anew after its first iteration, in the order in which gradients came. At three ranks and
    more the layout decides in which order numbers are added: without these passes the first step after every start
    would differ, in the last bits, from the same step of a run that goes on.
    """
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    for _ in range(2):
        wrapped(batch.inputs, batch.targets).sum().backward()
    wrapped.zero_grad(set_to_none=True)
    wrapped.load_state_dict(before)


def ddp_arguments(config: DdpConfig, device: str) -> dict[str, Any]:
    """The arguments of torch's DDP, under the names that the installed torch has for them."""
    known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    buffers = (
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    )  # renamed in torch 2.13
    arguments = {
        "device_ids": [torch.device(device)] if device.startswith("cuda") else None,
        "bucket_cap_mb": config.bucket_cap_mb,
        "gradient_as_bucket_view": config.gradient_as_bucket_view,
        "static_graph": config.static_graph,
        buffers: config.broadcast_buffers,
        "find_unused_parameters": config.find_unused_parameters,
        "skip_all_reduce_unused_params": config.skip_all_reduce_unused_params,
        "init_sync": config.init_sync,
    }
    if config.bucket_cap_mb_list is not None:
        arguments["bucket_cap_mb_list"] = config.bucket_cap_mb_list
    return arguments


def _register_comm_hook(wrapped: nn.parallel.DistributedDataParallel, config: DdpConfig) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if config.comm_hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif config.comm_hook == "bf16":
        wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif config.comm_hook == "powersgd":  # arXiv:1905.13727; plain all-reduce in 10 passes first
        state = powerSGD_hook.PowerSGDState(None, config.powersgd_rank, start_powerSGD_iter=10)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def build_strategy(config: Any, device: str) -> Strategy:
    """The strategy of a strategy section of the config."""
    if config.name == "ddp":
        return DistributedDataParallel(device, config)
    return DataParallel(device) if config.name == "dp" else Single(device)
