"""Losses of a sample that depend on what the model gave for other samples of the batch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ddp_train.tensor_tree import tensors

MOST_NODES = 2000
"""Operations of the graph that are looked at between the losses and the outputs."""
MOST_NUMBERS = 2**22
"""Numbers of an output that is looked at: logits of a language model would cost memory."""
MOST_VIEWS = 4
"""Rows of an output for each sample. Of more, they may be something else: nodes of one graph."""
NOT_TRIED = ("BatchNorm", "c10d", "CppNode", "NotImplemented")
"""Parts of the names of operations that mix rows rightly, are collectives, or may have no second
derivative."""
MIXED = (
    "run.mean: the loss of a sample depends on the model's outputs for other samples (in-batch"
    " negatives, mining, statistics over the batch). Each process has only its own samples, so"
    " the loss depends on the number of processes. To compare the samples of all processes, use"
    " rows, own = ddp_train.all_gather(outputs). To see whether the result changes, run"
    " `ddp-train prove train.py`"
)


def mixes_rows(losses: Tensor, outputs: Any, samples: int) -> bool:
    """True if the loss of a sample depends on the model's outputs for others.

    losses: one for each sample; of another number, as those of pairs, their sum is looked at.
    outputs: tensors, in any containers. Others than those of `dimensions_of_samples`, and graphs
        with operations in Python, are not looked at.

    Takes gradients of the losses with respect to the outputs alone. Waits for the device.
    """
    if samples < 2 or not losses.numel() or not losses.requires_grad:
        return False
    if not torch.is_grad_enabled():
        return False
    tried = [output for output in tensors(outputs) if dimensions_of_samples(output, samples)]
    if not tried:
        return False
    watched = watched_operations()
    with torch.autocast(losses.device.type, enabled=False):
        for output in tried:
            if not can_be_tried(losses, output, watched):
                continue
            try:
                mixes = _mixes(losses, output, samples)
            except RuntimeError:
                # Of this pass alone: no second derivative, or no memory for it. What is wrong with
                # the loop itself is raised by its own backward pass.
                continue
            if mixes:
                return True
    return False


def dimensions_of_samples(output: Tensor, samples: int) -> list[int]:
    """The dimensions in which the samples may stand: the first one, or the second, after time.

    None for tensors that do not come from samples, as the parameters that a model returns.
    """
    if output.is_leaf or output.is_nested or not output.is_floating_point():
        return []
    if output.numel() > MOST_NUMBERS:
        return []
    dimensions = []
    for dimension, size in enumerate(output.shape):
        is_features = dimension == output.ndim - 1 and dimension > 0
        views, rest = divmod(size, samples)
        if rest == 0 and 1 <= views <= MOST_VIEWS and not (is_features and views > 1):
            dimensions.append(dimension)
    return dimensions


def _mixes(losses: Tensor, output: Tensor, samples: int) -> bool:
    if losses.numel() == samples:
        return _share_numbers(losses.flatten(), output)
    return _couples_samples(losses.sum(), output, samples)


def _share_numbers(losses: Tensor, output: Tensor) -> bool:
    """True if losses of the first half of the samples depend on numbers that others depend on.

    Wherever a sample stands in an output, none of its numbers is another's.
    """
    early, late = losses.tensor_split(2)
    shared = _depends_on(early.sum(), output) & _depends_on(late.sum(), output)
    return bool(shared.any())


def _couples_samples(loss: Tensor, output: Tensor, samples: int) -> bool:
    """True if the gradient of a sum of losses by one sample's outputs depends on another's."""
    (gradient,) = torch.autograd.grad(loss, output, create_graph=True, allow_unused=True)
    if gradient is None or not gradient.requires_grad:
        return False
    if not can_be_tried(gradient, output, set()):
        return False
    # Unequal weights: gradients of differences add up to zero.
    weights = torch.linspace(1, 2, output.numel(), device=output.device, dtype=gradient.dtype)
    weighted = gradient * weights.view_as(gradient)
    for dimension in dimensions_of_samples(output, samples):
        size = output.size(dimension)
        # The first and the last row are of two samples, in whatever order the others stand.
        rows = samples // 2 if size == samples else 1
        early = weighted.narrow(dimension, 0, rows)
        late = _depends_on(early.sum(), output).narrow(dimension, size - rows, rows)
        if not late.any():
            return False  # no samples stand in this dimension, or they are separate
    return True


def _depends_on(value: Tensor, output: Tensor) -> Tensor:
    """True for the numbers of an output that a value depends on."""
    if not value.requires_grad:
        return torch.zeros_like(output, dtype=torch.bool)
    (gradient,) = torch.autograd.grad(value, output, retain_graph=True, allow_unused=True)
    if gradient is None:
        return torch.zeros_like(output, dtype=torch.bool)
    return gradient.isfinite() & (gradient != 0)


def watched_operations() -> set[Any]:
    """The operations whose results keep their gradient, or call a function with it.

    A further backward pass through one of them would be seen by the user's code.
    """
    living = [item for item in gc.get_objects() if type(item) is Tensor]
    return {
        tensor.grad_fn
        for tensor in living
        if tensor.grad_fn is not None and (tensor.retains_grad or tensor._backward_hooks)
    }


def can_be_tried(losses: Tensor, output: Tensor, watched: set[Any]) -> bool:
    """True if a further backward pass from the losses to the output disturbs nothing.

    That of an operation in Python may be a collective, as that of `all_gather` is, or one that
    comes once only, as those of compiled functions and of checkpoints.

    watched: operations that are not to be run.
    """
    nodes = list(_nodes_between(losses, output))
    if len(nodes) == MOST_NODES or output.grad_fn in watched or not watched.isdisjoint(nodes):
        return False
    return not any(
        isinstance(node, BackwardCFunction) or any(part in node.name() for part in NOT_TRIED)
        for node in nodes
    )


def _nodes_between(losses: Tensor, output: Tensor) -> Iterator[Any]:
    """The operations of the losses' graph, up to the output; at most MOST_NODES."""
    waiting = [losses.grad_fn]
    seen = {output.grad_fn, None}
    for _ in range(MOST_NODES):
        while waiting and waiting[-1] in seen:
            waiting.pop()
        if not waiting:
            return
        node: Any = waiting.pop()
        seen.add(node)
        yield node
        waiting += [before for before, _ in node.next_functions]
