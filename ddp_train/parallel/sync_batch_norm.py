"""Batch norm over the samples of all processes, on any device: torch's own SyncBatchNorm refuses
CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.distributed.process_group import total
from ddp_train.distributed.training_step import CURRENT
from ddp_train.text import counted


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm with mean and variance of all processes' samples, however many each one has.

    In evaluation it is torch's BatchNorm, and so are the names in its state_dict. The variance is
    taken around the mean in a second pass: a sum of squares would lose digits where the mean is
    large. Everything but the two sums is left to autograd. A stand-in (see `MicroBatch.num_real`)
    is normalised like other samples, and leaves no trace.
    """

    def __init__(self, like: nn.modules.batchnorm._BatchNorm) -> None:
        """Take the options, the mode and the very tensors of another layer."""
        super().__init__(
            like.num_features, like.eps, like.momentum, like.affine, like.track_running_stats
        )
        self.weight = like.weight
        self.bias = like.bias
        self.running_mean = like.running_mean
        self.running_var = like.running_var
        self.num_batches_tracked = like.num_batches_tracked
        self.train(like.training)
        # Never inside a compiled graph: torch 2.11 got the gradients wrong there, without a word.
        self.total_over_ranks: Callable[[Tensor], Tensor] = torch.compiler.disable(  # type: ignore[assignment]
            _total_of_samples
        )

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a batch. Every process must call it.

        input: [n, features, ...].

        Returns the same shape. Raises ValueError for fewer than 2 dimensions, and in training if
        all processes together have a single value for each feature.
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        wide = input
        if input.dtype in (torch.float16, torch.bfloat16):  # under autocast
            wide = input.float()
        dimensions = [dimension for dimension in range(input.ndim) if dimension != 1]
        shape = [1, -1] + [1] * (input.ndim - 2)
        values_here = wide.new_full((1,), input.numel() // self.num_features)
        sums = self.total_over_ranks(torch.cat([wide.sum(dimensions), values_here]))
        values = sums[-1]
        if values <= 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size"
                f" {input.shape}"
            )
        mean = sums[:-1] / values
        centred = wide - mean.view(shape)
        variance = self.total_over_ranks(centred.square().sum(dimensions)) / values
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach() * (values / (values - 1)))
        scale = (variance + self.eps).rsqrt()
        if self.affine:
            normalised = centred * (scale * self.weight).view(shape) + self.bias.view(shape)
        else:
            normalised = centred * scale.view(shape)
        return normalised.to(input.dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.ndim}")

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics as torch does.

        variance: unbiased. Momentum None is the plain average over all batches.
        """
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1 / self.num_batches_tracked.item()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)


def synchronised(module: nn.Module) -> nn.Module:
    """Replace every batch norm of a module by one with the statistics of all processes.

    Like torch's convert_sync_batchnorm, it also replaces subclasses of torch's layers and loses
    what they add.

    module: changed in place; its parameters and buffers remain the same tensors.

    Returns the module, or its replacement if it is a batch norm itself.
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return SyncBatchNorm(module)
    for name, child in module.named_children():
        setattr(module, name, synchronised(child))
    return module


def own_statistics(model: nn.Module) -> int:
    """The number of batch norms in training that normalise with this process's own samples."""
    together = (SyncBatchNorm, nn.SyncBatchNorm)
    return sum(
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and not isinstance(module, together)
        and module.training
        for module in model.modules()
    )


def cost_of(model: nn.Module, way_out: str) -> str:
    """The cost of batch norm over all processes, for people; "" for a model that has none.

    way_out: what turns it off.
    """
    together = (SyncBatchNorm, nn.SyncBatchNorm)
    layers = sum(isinstance(module, together) for module in model.modules())
    if not layers:
        return ""
    return (
        f"{counted(layers, 'batch norm')} over all processes: each layer exchanges statistics in"
        " every forward and backward pass, and the model waits for that (on two H200 ResNet-50"
        f" loses 46 % of its speed). With {way_out} each process uses its own statistics, and the"
        " result depends on the number of processes"
    )


def synchronised_on(device: str, module: nn.Module) -> nn.Module:
    """As `synchronised`; on GPUs by torch's own layer, which has kernels for them."""
    if device.startswith("cuda"):
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    return synchronised(module)


class _TotalOverRanks(torch.autograd.Function):
    """The sum over all processes of what each one has, times a factor of its own.

    Each local value is part of the result on every rank, so its gradient is the sum of all ranks'
    gradients: such a sum again, which can be differentiated too.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return total(local * factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole: Tensor = _TotalOverRanks.apply(gradients[0], 1.0)  # type: ignore[assignment]
        return whole * ctx.factor, None


def _total_of_samples(local: Tensor) -> Tensor:
    """The sum over all processes, but for those with a stand-in."""
    counts = CURRENT.step is None or CURRENT.step.counts
    # A factor, not a branch: every rank's backward pass must reach the exchange.
    return _TotalOverRanks.apply(local, float(counts))  # type: ignore[return-value]
