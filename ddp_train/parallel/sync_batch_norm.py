"""Batch norm over the samples of all processes, on any device: torch's own SyncBatchNorm refuses
CPU tensors."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from ddp_train.distributed.process_group import total
from ddp_train.distributed.training_step import CURRENT
from ddp_train.errors import ModelError
from ddp_train.text import counted


class SyncBatchNorm(_BatchNorm):
    """A batch norm with mean and variance of all processes' samples, however many each one has.

    In evaluation it is torch's BatchNorm, and so are the names in its state_dict. The variance is
    taken around the mean in a second pass: a sum of squares would lose digits where the mean is
    large. Everything but the two sums is left to autograd. A stand-in (see `MicroBatch.num_real`)
    is normalised like other samples, and leaves no trace.
    """

    @staticmethod
    def total_over_ranks(local: Tensor) -> Tensor:
        return _total_of_samples(local)

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


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """BatchNorm1d over all processes."""


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """BatchNorm2d over all processes."""


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """BatchNorm3d over all processes."""


class SyncBatchNormNd(SyncBatchNorm):
    """torch's SyncBatchNorm, of any number of dimensions, on any device.

    It has another class than torch's, which DDP refuses on CPUs.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.ndim}")


class GpuSyncBatchNorm(nn.SyncBatchNorm):
    """torch's batch norm over all processes, which has kernels for GPUs."""

    process_group = None
    """All processes."""


class GpuSyncBatchNorm1d(GpuSyncBatchNorm, nn.BatchNorm1d):
    """BatchNorm1d over all processes, by torch's kernels."""


class GpuSyncBatchNorm2d(GpuSyncBatchNorm, nn.BatchNorm2d):
    """BatchNorm2d over all processes, by torch's kernels."""


class GpuSyncBatchNorm3d(GpuSyncBatchNorm, nn.BatchNorm3d):
    """BatchNorm3d over all processes, by torch's kernels."""


TOGETHER = (SyncBatchNorm, nn.SyncBatchNorm)
"""The classes of layers with the statistics of all processes."""
Classes = dict[type[_BatchNorm], type[_BatchNorm]]
OURS: Classes = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    _BatchNorm: SyncBatchNorm,
}
"""A class of torch -> that with the statistics of all processes."""
OF_GPU: Classes = {
    nn.BatchNorm1d: GpuSyncBatchNorm1d,
    nn.BatchNorm2d: GpuSyncBatchNorm2d,
    nn.BatchNorm3d: GpuSyncBatchNorm3d,
    _BatchNorm: GpuSyncBatchNorm,
}


def synchronised(module: nn.Module) -> nn.Module:
    """Let every batch norm of a module take the statistics of all processes.

    The layers remain the same objects, and their class becomes a subclass of their own, so that
    `isinstance(layer, nn.BatchNorm2d)` holds. A subclass of yours keeps what it adds; its forward
    must call super().forward.

    module: changed in place.

    Returns the module. Raises ModelError for lazy layers that have seen no batch.
    """
    return _with_classes(OURS, module)


def synchronised_on(device: str, module: nn.Module) -> nn.Module:
    """As `synchronised`; on GPUs by torch's own layer, which has kernels for them.

    Layers that are over all processes already stay as they are.
    """
    if device.startswith("cuda"):
        return _with_classes(OF_GPU, module)
    return _with_classes(OURS, module)


def _with_classes(classes: Classes, module: nn.Module) -> nn.Module:
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    if layers and classes is OURS:
        # Never inside a compiled graph: torch 2.11 got the gradients wrong there, without a word.
        # Not where the class is made, since this imports the compiler.
        outside: Any = torch.compiler.disable(_total_of_samples)
        SyncBatchNorm.total_over_ranks = staticmethod(outside)
    for layer in layers:
        if type(layer) is nn.SyncBatchNorm and classes is OURS:
            layer.__class__ = SyncBatchNormNd  # type: ignore[assignment]
        elif isinstance(layer, LazyModuleMixin):
            raise ModelError(
                f"batch norm over all processes: a {type(layer).__name__} is not the layer yet"
                " that it becomes in its first forward pass",
                "give it its number of features, as nn.BatchNorm2d(64), or call the model once"
                " after it is created",
            )
        elif not isinstance(layer, TOGETHER):
            layer.__class__ = _together(type(layer), classes is OF_GPU)
    return module


@functools.cache
def _together(own: type[_BatchNorm], on_gpu: bool) -> type[_BatchNorm]:
    """The class of a layer over all processes.

    own: the layer's class so far; what a subclass of the user's adds comes first.
    """
    classes = OF_GPU if on_gpu else OURS
    of_torch = next(cls for cls in classes if issubclass(own, cls))
    together = classes[of_torch]
    if own is of_torch:
        return together
    bases = (_OfUser, own, _Reached, together)
    return type(f"Sync{own.__name__}", bases, {"of_user": own, "on_gpu": on_gpu})


_CHECKED: weakref.WeakSet[_BatchNorm] = weakref.WeakSet()
"""Layers with a class of the user's whose forward is known to be right."""


class _OfUser:
    """The first base of a layer with a class of the user's."""

    of_user: type[_BatchNorm]
    on_gpu: bool

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Raise ModelError, in the first forward pass in train mode, if the user's forward takes
        the statistics itself."""
        layer: Any = self
        if not layer.training or layer in _CHECKED:
            return super().forward(*inputs, **named)  # type: ignore[misc]
        statistic: Tensor | None = layer.running_mean
        before = None
        if statistic is not None:
            before = statistic.clone()
        outputs = super().forward(*inputs, **named)  # type: ignore[misc]
        is_frozen = before is not None and torch.equal(before, layer.running_mean)
        if layer in _CHECKED or is_frozen:
            _CHECKED.add(layer)
            return outputs
        name = self.of_user.__name__
        raise ModelError(
            f"batch norm over all processes: {name}.forward does not call super().forward, but"
            " takes the statistics of one process itself",
            f"call super().forward(inputs) in {name}.forward, or let each process have its own"
            " statistics: strategy.sync_bn=false, in a session run.wrap(model,"
            " sync_batch_norm=False)",
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A class that is made while a program runs is pickled by what it is made of."""
        _, _, *rest = super().__reduce_ex__(protocol)
        return _empty_layer, (self.of_user, self.on_gpu), *rest


class _Reached:
    """The base between a class of the user's and that over all processes."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        layer: Any = self
        _CHECKED.add(layer)
        return super().forward(*inputs, **named)  # type: ignore[misc]


def _empty_layer(own: type[_BatchNorm], on_gpu: bool) -> _BatchNorm:
    cls = _together(own, on_gpu)
    return cls.__new__(cls)


def own_statistics(model: nn.Module) -> int:
    """The number of batch norms in training that normalise with this process's own samples."""
    return sum(
        isinstance(module, _BatchNorm) and not isinstance(module, TOGETHER) and module.training
        for module in model.modules()
    )


def cost_of(model: nn.Module, way_out: str) -> str:
    """The cost of batch norm over all processes, for people; "" for a model that has none.

    way_out: what turns it off.
    """
    layers = sum(isinstance(module, TOGETHER) for module in model.modules())
    if not layers:
        return ""
    return (
        f"{counted(layers, 'batch norm')} over all processes: each layer exchanges statistics in"
        " every forward and backward pass, and the model waits for that (on two H200 ResNet-50"
        f" loses 46 % of its speed). With {way_out} each process uses its own statistics, and the"
        " result depends on the number of processes"
    )


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
