"""What a step whose batch is empty needs: networks take it where torch would not."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_RESHAPES = frozenset({Tensor.view, Tensor.reshape, torch.reshape})
_REFUSE_NO_ROWS = frozenset({torch.pixel_shuffle, torch.pixel_unshuffle, functional.instance_norm})
"""Functions of images, each by itself, that torch 2.15 does not do for none, or whose backward pass
it does not."""


def step_without_samples() -> contextlib.ExitStack:
    """A context around forward and backward of an empty batch."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(TakesNoRows())
        if "torch._dynamo" in sys.modules:  # importing it takes seconds
            # A graph for a shape that comes once in an epoch is compiled for nothing.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        return stack.pop_all()


class TakesNoRows(TorchFunctionMode):
    """Inside, `x.view(len(x), -1)` works without rows too, and so do some functions of images,
    attention with masks and the CTC loss; in torch they are errors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _RESHAPES and len(args) > 1 and not isinstance(args[1], torch.dtype):
            tensor, *size = args
            if isinstance(size[0], list | tuple):
                size = size[0]
            args = (tensor, reshaped_size(tuple(tensor.shape), tuple(size)))
        elif func in _REFUSE_NO_ROWS and kwargs.get("running_mean") is None and not len(args[0]):
            images, *others = args
            one_row = torch.cat([images, images.new_zeros(1, *images.shape[1:])])
            return func(one_row, *others, **kwargs)[:0]
        elif func is functional.multi_head_attention_forward and not args[0].numel():
            kwargs = without_masks_of_samples(kwargs)
        elif func is functional.ctc_loss and args and not args[0].numel():
            return ctc_loss_of_none(*args, **kwargs)
        return func(*args, **kwargs)


def without_masks_of_samples(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of multi_head_attention_forward without what it cannot reshape: masks that
    each sample has for itself, of which there is none. One that all share stays."""
    kwargs = {**kwargs, "key_padding_mask": None}
    mask = kwargs.get("attn_mask")
    if mask is not None and mask.dim() == 3:
        kwargs.update(attn_mask=None, is_causal=False)
    return kwargs


def ctc_loss_of_none(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """The CTC loss of no sample, with torch's arguments: [0] with reduction="none", else 0.

    log_probs: [time, 0, classes].
    """
    losses = log_probs.sum((0, 2))
    return losses if reduction == "none" else losses.sum()


def reshaped_size(shape: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...]:
    """The size that `view` or `reshape` is given, with -1 replaced where torch cannot tell it.

    Without rows any number would do. This is the one for a single row.

    shape: of the tensor.
    """
    if 0 not in shape or 0 not in size or -1 not in size:
        return size
    elements_of_row = math.prod(max(length, 1) for length in shape)
    known = math.prod(max(length, 1) for length in size if length != -1)
    return tuple(elements_of_row // known if length == -1 else length for length in size)
