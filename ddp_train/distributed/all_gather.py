"""All-gather with gradients, for losses that compare samples, as CLIP's and SimCLR's do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_train.distributed.process_group import side_group
from ddp_train.distributed.training_step import ALL_GATHER, CURRENT
from ddp_train.errors import ConfigError, DataError, LaunchError


@torch.compiler.disable  # pyright: ignore[reportUntypedFunctionDecorator]
def all_gather(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Collect the rows of all processes, with gradients of any order.

    Every process must call it at the same place and use the rows in its loss: the backward pass is
    a collective too.

    tensor: [n, ...]; n may differ between processes, all other dimensions and the dtype may not.

    Returns (rows, own). `rows`, [all, ...], is in the order of the global batch. `own`, int64 [n],
    has the positions of this process's rows: `rows[own]` equals `tensor`. Gradients flow to the
    rows of all processes. If each process's loss is a sum over its own rows, the gradient is that
    of the sum over all rows.

    Nothing is collected on one process, or outside of a training step, as in an evaluation: `rows`
    is `tensor` itself. In an evaluation each batch is computed by one process, and the batches are
    the same on any number of processes.

    Raises ConfigError if the rows of all processes are not the global batch: with accumulation,
    with strategy=ordered, on several GPUs with strategy=dp. Raises LaunchError while a step is
    captured as a CUDA graph, and DataError if the shapes or dtypes do not fit together.
    """
    if tensor.ndim == 0:
        raise DataError(
            "ddp_train.all_gather got a tensor without dimensions", "pass rows, [n, ...]"
        )
    CURRENT.gathers += 1
    step = CURRENT.step
    if step and step.refused:
        raise ConfigError([step.refused])
    if not step or not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor, torch.arange(len(tensor), device=tensor.device)
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            "ddp_train.all_gather copies sizes from the device, and a captured step cannot",
            "use tuning.cuda_graph=false",
        )
    # In a backward pass DDP sends a bucket of gradients once its last gradient is there. Where
    # processes use different parameters (strategy.find_unused_parameters), that is before this
    # function's own collective on one of them and after it on another: in one group the two would
    # be taken for each other. In two groups only the order of gathers matters, which is that of the
    # program, and no process waits for a bucket before its backward pass ends.
    group = side_group()
    if CURRENT.see_exchange:
        CURRENT.see_exchange(ALL_GATHER)
    counted = tensor if step.counts else tensor[:0]
    sizes = _sizes(counted, group)
    rank = dist.get_rank()
    rows = _Gather.apply(counted, sizes, group)
    start = sum(sizes[:rank])
    if not step.counts:
        # A stand-in finds its own row, whose loss has weight zero, after those that count.
        rows = torch.cat([rows, tensor])
        start = sum(sizes)
    return rows, torch.arange(start, start + len(tensor), device=tensor.device)


def _sizes(tensor: Tensor, group: Any) -> list[int]:
    """The number of rows of each process. Waits for the device. Raises DataError if something else
    differs."""
    kind = f"{list(tensor.shape[1:])} of {tensor.dtype}"
    mark = int.from_bytes(kind.encode()[-200:], "big") % (2**61 - 1)
    mine = torch.tensor([len(tensor), mark], device=tensor.device)
    of_ranks = mine.new_empty(2 * dist.get_world_size(group))
    dist.all_gather_into_tensor(of_ranks, mine, group=group)
    numbers = of_ranks.view(-1, 2).tolist()
    if any(other != mark for _, other in numbers):
        raise DataError(
            "ddp_train.all_gather: the rows of the processes differ in shape or dtype; here they"
            f" are {kind}",
            "pass rows of the same shape and dtype on all processes, and call it in the same order",
        )
    return [rows for rows, _ in numbers]


class _Gather(torch.autograd.Function):
    """Rows of all processes. A row is part of the result on every process: its gradient is the sum
    of all of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: list[int], group: Any) -> Tensor:
        ctx.sizes = sizes
        ctx.group = group
        most = max(sizes)
        row = tensor.shape[1:]
        padded = tensor.new_zeros(most, *row)
        padded[: len(tensor)] = tensor
        sent = padded.view(-1).view(torch.uint8)  # bytes: collectives do not know every dtype
        received = sent.new_empty(len(sizes) * len(sent))
        dist.all_gather_into_tensor(received, sent, group=group)
        rows = received.view(tensor.dtype).view(len(sizes), most, *row)
        return torch.cat([part[:size] for part, size in zip(rows, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        own: Tensor = _SumOfOwnRows.apply(gradients[0], ctx.sizes, ctx.group)  # type: ignore[assignment]
        return own, None, None


class _SumOfOwnRows(torch.autograd.Function):
    """This process's rows of the sum over all processes. Each process takes its rows from what all
    have, so the gradient has the rows of all."""

    @staticmethod
    def forward(ctx: Any, of_all: Tensor, sizes: list[int], group: Any) -> Tensor:
        ctx.sizes = sizes
        ctx.group = group
        rank = dist.get_rank()
        # A sum in half precision would be rounded each time.
        wide = torch.promote_types(of_all.dtype, torch.float32)
        whole = of_all.to(wide, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        start = sum(sizes[:rank])
        return whole[start : start + sizes[rank]].to(of_all.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows: Tensor = _Gather.apply(gradients[0], ctx.sizes, ctx.group)  # type: ignore[assignment]
        return rows, None, None
