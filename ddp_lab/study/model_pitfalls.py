"""Parts of a model that often go wrong with several processes, as the gradient probe noted them."""

from __future__ import annotations

from typing import Any

TINY_BATCH = 16
"""Samples below which batch norm loses accuracy (arXiv:1803.08494, figure 1)."""
UNUSED_REMEDY = "DDP needs strategy.find_unused_parameters=true for such parameters"

Pitfalls = dict[str, list[str]]
"""Names of parameters or layers, by the problem they may have."""


def pitfalls_of(facts: dict[str, Any], processes: int) -> Pitfalls:
    """The possible problems of a model.

    facts: what the gradient probe noted of it (model.json).
    processes: number of processes of the run.
    """
    pitfalls: Pitfalls = {}
    if facts["unused"]:
        pitfalls[f"no gradient in this step; {UNUSED_REMEDY}"] = facts["unused"]
    pitfalls |= _of_batch_norm(facts["batch_norm"], processes)
    if facts["bias_before_norm"]:
        problem = "the bias has no effect, since a norm layer follows: use bias=False"
        pitfalls[problem] = facts["bias_before_norm"]
    if facts["dropout"]:
        problem = "dropout, off in this test: its random numbers depend on the process"
        pitfalls[problem] = facts["dropout"]
    if facts["unseen"]:
        pitfalls["not checked"] = facts["unseen"]
    return pitfalls


def _of_batch_norm(samples_by_layer: dict[str, int], processes: int) -> Pitfalls:
    pitfalls: Pitfalls = {}
    if samples_by_layer and processes > 1:
        problem = "batch norm: uses only the samples of its process unless strategy.sync_bn=true"
        pitfalls[problem] = list(samples_by_layer)
    small = [name for name, samples in samples_by_layer.items() if samples < TINY_BATCH]
    if small:
        least = min(samples_by_layer.values())
        problem = (
            f"batch norm over small batches, {least} samples: use larger ones,"
            " strategy.sync_bn=true or group norm"
        )
        pitfalls[problem] = small
    return pitfalls
