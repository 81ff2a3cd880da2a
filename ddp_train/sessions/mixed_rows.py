"""Losses of a sample that depend on what the model gave for other samples of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ddp_train.tensor_tree import tensors

MOST_NODES = 2000
"""Operations of the graph that are looked at between the losses and the outputs."""
NOT_TRIED = ("BatchNorm", "c10d")
"""Parts of the names of torch's own operations that mix rows rightly, or are collectives."""
MIXED = (
    "run.mean: the loss of a sample depends on the model's outputs for others (in-batch negatives,"
    " mining, statistics over the batch), and each process has only its own: on another number of"
    " processes it is another loss. The rows of all: rows, own = ddp_train.all_gather(outputs)"
)


def mixes_rows(losses: Tensor, outputs: Any, samples: int) -> bool:
    """True if the losses of the first half of the samples depend on outputs for the others.

    losses, outputs: several rows for each sample, one behind the other or all first ones first.
        Other shapes, and graphs with operations in Python, are not looked at.

    Takes gradients of the losses with respect to the outputs alone. Waits for the device.
    """
    if samples < 2 or not losses.ndim or not losses.requires_grad:
        return False
    if not len(losses) or len(losses) % samples:
        return False
    for output in tensors(outputs):
        has_rows = output.ndim > 0 and len(output) > 0 and len(output) % samples == 0
        if not has_rows or not output.requires_grad or not _can_be_tried(losses, output):
            continue
        if all(
            _crosses(losses, output, samples, order) for order in (_one_behind_other, _in_turns)
        ):
            return True
    return False


def _crosses(losses: Tensor, output: Tensor, samples: int, order: Any) -> bool:
    is_early_loss = order(len(losses), samples) < samples // 2
    is_early_row = order(len(output), samples) < samples // 2
    part = losses[is_early_loss.to(losses.device)].sum()
    (gradient,) = torch.autograd.grad(part, output, retain_graph=True, allow_unused=True)
    if gradient is None:
        return False
    others = gradient[~is_early_row.to(gradient.device)]
    return bool((others.isfinite() & (others != 0)).any())


def _one_behind_other(rows: int, samples: int) -> Tensor:
    """The sample of each row, where the rows of a sample stand together."""
    return torch.arange(rows) // (rows // samples)


def _in_turns(rows: int, samples: int) -> Tensor:
    """The sample of each row, where the first rows of all samples come first."""
    return torch.arange(rows) % samples


def _can_be_tried(losses: Tensor, output: Tensor) -> bool:
    """True if a further backward pass from the losses to the output disturbs nothing.

    That of an operation in Python may be a collective, as that of `all_gather` is, or one that
    comes once only, as those of compiled functions and of checkpoints.
    """
    nodes = list(_nodes_between(losses, output))
    if len(nodes) == MOST_NODES:
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
