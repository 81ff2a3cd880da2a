"""Losses whose own mean, torch's reduction='mean', is not the one over samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

MOST_NODES = 64
"""Operations of the graph that are looked at, those behind the losses first."""
NODES_OF_NLL = ("NllLossBackward", "NllLoss2DBackward")
"""Names of the nodes that nll_loss, which ends cross_entropy, leaves in a graph."""
WEIGHTED = (
    "run.mean: the losses have class weights, but run.mean divides by the number of samples."
    " torch's reduction='mean' divides by the sum of the weights. To do the same, use"
    " run.mean(losses, over=weight[targets])"
)
LEFT_OUT = (
    "run.mean: some targets are left out (ignore_index), but run.mean counts them. torch's"
    " reduction='mean' does not count them. To do the same, use run.mean(losses, over=targets !="
    " %d), with losses of reduction='none'"
)


def other_mean(losses: Tensor) -> str | None:
    """A warning of losses by cross_entropy whose own mean is another; None for all others.

    losses: as run.mean gets them without `over`.

    Waits for the device, if there are such losses.
    """
    for node in _nodes_behind(losses):
        if not node.name().startswith(NODES_OF_NLL):
            continue
        if node._saved_weight is not None:
            return WEIGHTED
        ignored = node._saved_ignore_index
        if ignored >= 2**63:
            ignored -= 2**64  # it is kept without a sign
        if bool((node._saved_target == ignored).any()):
            return LEFT_OUT % ignored
    return None


def _nodes_behind(losses: Tensor) -> Iterator[Any]:
    """The first operations of the graph that the losses come from, nearest first."""
    nodes = [losses.grad_fn]
    for place in range(MOST_NODES):
        if place == len(nodes):
            return
        node = nodes[place]
        if node is not None:
            yield node
            nodes += [before for before, _ in node.next_functions]
