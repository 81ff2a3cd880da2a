"""What exchanges in a model or a loss must know of the current training step. Strategies and
sessions set it."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

ACCUMULATES = (
    "train.accumulation_steps: ddp_train.all_gather sees the samples of one micro-batch, so the"
    " loss would depend on accumulation; use train.accumulation_steps=1"
)
NO_SAMPLE = (
    "(this process has no sample in this step, and a batch of the length 0, which whatever is"
    " computed of it must take: x.flatten(1), sums, no x[0], no division by len(x))"
)
_RESHAPES = frozenset({Tensor.view, Tensor.reshape, torch.reshape})
_REFUSE_NO_ROWS = frozenset({torch.pixel_shuffle, torch.pixel_unshuffle, functional.instance_norm})
"""Functions of images, each by itself, that torch 2.15 does not do for none, or whose backward pass
it does not."""


class TrainingStep:
    """A context around forward and backward of a micro-batch."""

    def __init__(self, counts: bool = True, is_last: bool = True, refused: str = "") -> None:
        """counts: whether this process has samples; else its batch is empty, see
            `data.batch_plan.MicroBatch`.
        is_last: whether the micro-batch is the last of its optimizer step.
        refused: why rows cannot be gathered here, with the remedy.
        """
        self.counts = counts
        self.refused = refused or ("" if is_last else ACCUMULATES)
        self.leave: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        CURRENT.step = self
        if not self.counts:
            with contextlib.ExitStack() as stack:
                stack.enter_context(TakesNoRows())
                if "torch._dynamo" in sys.modules:  # importing it takes seconds
                    # A graph for a shape that comes once in an epoch is compiled for nothing.
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                self.leave = stack.pop_all().close

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        CURRENT.step = None
        if not self.counts:
            self.leave()
            if error is not None:
                error.add_note(NO_SAMPLE)


class TakesNoRows(TorchFunctionMode):
    """Inside, `x.view(len(x), -1)` works without rows too, and so do some functions of images; in
    torch they are errors."""

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
        return func(*args, **kwargs)


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


class Current:
    """The current step of the process, not of a thread: the replicas of DataParallel run in threads
    of their own. An object holds it, since each assignment to a class empties Python's caches for
    that class."""

    step: TrainingStep | None = None


CURRENT = Current()
training_step = functools.cache(TrainingStep)
"""Returns a shared TrainingStep: making one takes a microsecond of each step."""
