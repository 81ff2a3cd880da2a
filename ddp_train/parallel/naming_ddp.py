"""torch's DDP with its arguments and hooks, and with an error that names parameters without a
gradient."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_train.distributed.process_group import ranks
from ddp_train.errors import ConfigError, ModelError
from ddp_train.parallel.gradient_check import missing_gradients, trained_parameters

BUCKET_MB = {"large": 125, "one": 2**20}
"""Largest size of a bucket in MiB. An H100 sends 125 MiB to another in 0.5 ms."""
SEVERAL_BUCKETS = (
    "strategy.comm_hook=powersgd: over gloo all gradients must be in one bucket, since with"
    " several torch's hook gives wrong gradients or hangs; leave out strategy.bucket_cap_mb and"
    " strategy.bucket_cap_mb_list, or use strategy.comm_hook=fp16"
)


class NamingDdp(DistributedDataParallel):
    """torch's DDP, whose own error has numbers in place of names."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """
        options: those of torch's DDP.

        Raises ModelError for parameters of lazy layers, and for sparse gradients over NCCL.
        """
        names = list(trained_parameters(module))
        if dist.get_backend() != "gloo":
            _refuse_sparse_tables(module)
        super().__init__(module, **options)
        self.trained = names

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, are_sparse = super()._build_params_for_reducer()
        for parameter, is_sparse in zip(parameters, are_sparse, strict=True):
            if is_sparse and parameter.requires_grad:
                parameter.register_hook(_own_values)
        return parameters, are_sparse

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Compute as DDP does. Raises ModelError if parameters had no gradient in the last step."""
        try:
            return super().forward(*inputs, **keywords)
        except RuntimeError as error:
            self._raise_with_names(error)
            raise

    def check_finished(self) -> None:
        """Raise ModelError if gradients of the last backward pass wait for others to come."""
        try:
            self.reducer._rebuild_buckets()  # begins with that check
        except RuntimeError as error:
            self._raise_with_names(error)
            raise

    def _raise_with_names(self, error: RuntimeError) -> None:
        """Raise ModelError if torch's error says which parameters had no gradient."""
        match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        if match:
            names = [self.trained[int(number)] for number in match[1].split()]
            names.sort(key=list(trained_parameters(self.module)).index)
            raise missing_gradients(names) from error


def _refuse_sparse_tables(module: nn.Module) -> None:
    """Raise ModelError for tables with sparse gradients, which torch exchanges over gloo alone."""
    tables = [
        name.removeprefix("model.")
        for name, part in module.named_modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag))
        and part.sparse
        and part.weight.requires_grad
    ]
    if tables:
        raise ModelError(
            f"{', '.join(tables)}: torch cannot exchange sparse gradients over NCCL",
            "use sparse=False, and Adam in place of SparseAdam; or train on one GPU",
        )


def _own_values(gradient: Tensor) -> Tensor:
    """A sparse gradient that shares its values with no other one.

    Autograd gives tables that are added one tensor of values, and DDP divides it by the number of
    processes once for each of them: seen with torch 2.15.
    """
    return gradient.clone() if gradient.is_sparse else gradient


class FixedLayoutDdp(NamingDdp):
    """DDP whose buckets are laid out once, in the reverse order of the parameters.

    torch lays them out anew after the first backward pass, in the order in which gradients came,
    which is mostly that one. At three ranks and more the layout decides in which order numbers are
    added: a resumed run would differ in its first step from one that was not interrupted.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """options: those of torch's DDP, without find_unused_parameters.

        Raises ModelError for parameters of lazy layers.
        """
        super().__init__(module, **options)
        self.trained.reverse()
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, are_sparse = super()._build_params_for_reducer()
        return parameters[::-1], are_sparse[::-1]


def ddp_arguments(
    device: str,
    broadcast_buffers: bool = True,
    bucket_cap_mb_list: list[float] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The arguments of torch's DDP, under the names that the installed torch has for them.

    One process broadcasts no buffers: DDP would send them to itself and copy each back in every
    step, 363 copies for densenet121.
    """
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers_option = "broadcast_buffers"
    if "forward_sync_buffers" in known:  # in torch 2.13
        buffers_option = "forward_sync_buffers"
    arguments = {buffers_option: broadcast_buffers and ranks() > 1, **options}
    if device.startswith("cuda"):
        arguments["device_ids"] = [torch.device(device)]
    if bucket_cap_mb_list is not None:
        arguments["bucket_cap_mb_list"] = bucket_cap_mb_list
    return arguments


def with_bucket_size(options: dict[str, Any], buckets: str, comm_hook: str) -> dict[str, Any]:
    """A copy of DDP's options with a size of its buckets, unless it has one.

    buckets: default, or a key of BUCKET_MB. PowerSGD over gloo needs a single bucket.
    """
    if options.get("bucket_cap_mb") or options.get("bucket_cap_mb_list"):
        return dict(options)
    if comm_hook == "powersgd" and dist.get_backend() == "gloo":
        buckets = "one"
    return {**options, "bucket_cap_mb": BUCKET_MB.get(buckets)}


def is_exchanged_at_once(wrapped: DistributedDataParallel) -> bool:
    """True if no bucket is full before the backward pass ends: there is one for each number
    type."""
    caps = getattr(wrapped, "bucket_bytes_cap_list", None) or [wrapped.bucket_bytes_cap]
    nbytes = sum(parameter.nbytes for parameter in trained_parameters(wrapped.module).values())
    return nbytes <= min(caps)


def register_comm_hook(wrapped: DistributedDataParallel, name: str, powersgd_rank: int) -> None:
    """Compress gradients before the exchange.

    Raises ConfigError for PowerSGD over gloo with several buckets. Its hook exchanges the factors
    of a bucket in gloo's threads and waits there, in an order that each rank decides for itself:
    with two buckets three processes were killed by SIGABRT, with more they waited for each other
    (torch 2.15).
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    match name:
        case "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        case "bf16":
            wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
        case "powersgd":
            if dist.get_backend() == "gloo" and not _has_one_bucket(wrapped):
                raise ConfigError([SEVERAL_BUCKETS])
            # arXiv:1905.13727; plain all-reduce in 10 passes first.
            state = powerSGD_hook.PowerSGDState(None, powersgd_rank, start_powerSGD_iter=10)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _has_one_bucket(wrapped: DistributedDataParallel) -> bool:
    types = {parameter.dtype for parameter in trained_parameters(wrapped.module).values()}
    return len(types) == 1 and is_exchanged_at_once(wrapped)
