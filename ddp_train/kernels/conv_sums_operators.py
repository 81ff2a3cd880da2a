"""Two operators of torch: a convolution with the sums of its outputs, and the batch norm of these.

The variance is mean(y^2) - mean(y)^2 in float32: its relative error is some 1e-7 times 1 + mean^2 /
variance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import decompositions, fast_random_decomps
from torch.nn import functional

from ddp_train.kernels.genstats import Case, empty_outputs, fastest_kernel


@dataclass(frozen=True)
class BatchNorm:
    """The arguments of a batch norm in training: tensors, or proxies of them."""

    running_mean: Tensor
    running_var: Tensor
    weight: Tensor
    bias: Tensor
    momentum: float
    eps: float

    def normalise(self, y: Tensor, sums: Tensor, count: int) -> Tensor:
        """As torch.nn.functional.batch_norm. Updates the running averages.

        y: [n, k, oh, ow].
        sums: [2, k], over `count` = n * oh * ow outputs.
        """
        momentum = self.momentum
        mean, variance = _moments(sums, count)
        self.running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
        unbiased = momentum * count / (count - 1)
        self.running_var.mul_(1 - momentum).add_(variance, alpha=unbiased)
        outputs = torch.ops.ddp_train.normalised(y, sums, self.weight, self.bias, count, self.eps)
        return outputs[0]


def _moments(sums: Tensor, count: int) -> tuple[Tensor, Tensor]:
    mean = sums[0] / count
    return mean, (sums[1] / count - mean * mean).clamp(min=0)


@torch.library.custom_op("ddp_train::conv_sums", mutates_args=())
def conv_sums(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> tuple[Tensor, Tensor]:
    """[n, c, h, w] and [k, c, r, s] -> the convolution, [n, k, oh, ow], channels_last, and the sums
    of its outputs and of their squares, [2, k], float32. Where cuDNN has no kernel for it, in three
    passes."""
    x = x.contiguous(memory_format=torch.channels_last)
    weight = weight.contiguous(memory_format=torch.channels_last)
    if x.is_cuda:
        window = (tuple(stride), tuple(padding), tuple(dilation))
        with torch.cuda.device_of(x):
            kernel = fastest_kernel(Case(x.device, x.dtype, x.shape, weight.shape, *window))
            if kernel:
                y, sums = empty_outputs(x, weight, stride, padding, dilation)
                kernel(x, weight, y, sums)
                return y, sums
    y = functional.conv2d(x, weight, None, stride, padding, dilation)
    y = y.contiguous(memory_format=torch.channels_last)
    # Makes no copy of y in 32 bits.
    norms = torch.linalg.vector_norm(y, dim=(0, 2, 3), dtype=torch.float32)
    return y, torch.stack([y.sum((0, 2, 3), dtype=torch.float32), norms.square()])


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, *ctx.window = inputs
    ctx.save_for_backward(x, weight)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _conv_gradient(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    needed = [*ctx.needs_input_grad[:2], False]
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        dy, *ctx.saved_tensors, None, *ctx.window, False, [0, 0], 1, needed
    )
    return dx, dweight, None, None, None


conv_sums.register_fake(empty_outputs)
conv_sums.register_autograd(_conv_gradient, setup_context=_save_inputs)


def _normalised(
    y: Tensor, sums: Tensor, weight: Tensor, bias: Tensor, count: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, variance = _moments(sums, count)
    inverse = torch.rsqrt(variance + eps)
    shift, scale, start = (one.view(1, -1, 1, 1) for one in (mean, inverse * weight, bias))
    return ((y.float() - shift) * scale + start).to(y.dtype), mean, inverse


@torch.library.custom_op("ddp_train::normalised", mutates_args=())
def normalised(
    y: Tensor, sums: Tensor, weight: Tensor, bias: Tensor, count: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A batch norm of y, [n, k, oh, ow], whose sums, [2, k], are known: in y's type, with mean and
    inverse standard deviation, [k], float32. Its gradient is that of torch's own, in which the sums
    depend on y."""
    return _normalised(y, sums, weight, bias, count, eps)


def _save_moments(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    y, _, weight, *_, ctx.eps = inputs
    ctx.save_for_backward(y, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _norm_gradient(ctx: Any, dz: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dz is None:
        return (None,) * 6
    y, weight, mean, inverse = ctx.saved_tensors
    needed = [ctx.needs_input_grad[place] for place in (0, 2, 3)]
    dy, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
        dz, y, weight, None, None, mean, inverse, True, ctx.eps, needed
    )
    return dy, None, dweight, dbias, None, None


normalised.register_fake(_normalised)
normalised.register_autograd(_norm_gradient, setup_context=_save_moments)
# The compiler fuses it with what follows.
decompositions[torch.ops.ddp_train.normalised.default] = _normalised
fast_random_decomps.cache_clear()  # a copy, if something was compiled before
