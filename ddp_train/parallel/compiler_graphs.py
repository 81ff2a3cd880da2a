"""The number of graphs into which torch's compiler cuts a model inside DDP: one or several."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_train.distributed.process_group import from_leader, ranks
from ddp_train.parallel.gradient_check import trained_parameters
from ddp_train.parallel.naming_ddp import BUCKET_MB, is_exchanged_at_once

log = logging.getLogger(__name__)

FLOPS_PER_BYTE_SENT = 25_000
"""Operations of a step for each byte that is sent, from which on one bucket is faster.

At 11,000 it was 3 % faster to exchange gradients during the backward pass, at 78,000 the cuts cost
2 % more than that saves; from 19,000 to 56,000 the two differ by 0.3 %
(docs/inside/benchmarks/buckets.md: two H100, bf16)."""
FIRST_BUCKET_BYTES = 2**20
"""Size of DDP's first bucket, so small that the exchange begins early. The compiler refuses others
that are smaller."""


def buckets_by_flops(
    module: nn.Module, step_flops: Callable[[], int | None] | None, device: str
) -> str:
    """The key of BUCKET_MB that suits a model, by how long an exchange takes beside a step.

    A collective: every process must count, since a model's forward pass may wait for all; rank 0's
    number decides. Gradients count as they are, since a hook that compresses them takes as long as
    it saves.

    step_flops: see `Strategy.wrap`. Not called if all gradients fit into a large bucket.

    Raises ModelError for parameters of lazy layers.
    """
    count = ranks()
    if count == 1:
        return "one"
    nbytes_here = sum(parameter.nbytes for parameter in trained_parameters(module).values())
    nbytes = from_leader(nbytes_here, device)
    if nbytes <= BUCKET_MB["large"] * 2**20:
        return "one"
    flops_here = step_flops() if step_flops else None
    flops = from_leader(flops_here, device)
    if not flops:
        log.info(
            "tuning.buckets=by_flops: large, since the operations for each byte that is sent are"
            " not known"
        )
        return "large"
    # What each process sends in an all-reduce by a ring.
    bytes_sent = 2 * (count - 1) / count * nbytes
    flops_per_byte = flops / bytes_sent
    buckets = "one" if flops_per_byte >= FLOPS_PER_BYTE_SENT else "large"
    log.info(
        "tuning.buckets=by_flops: %s, with %s operations for each byte that is sent",
        buckets,
        f"{flops_per_byte:,.0f}",
    )
    return buckets


def choose_graphs(wrapped: DistributedDataParallel) -> None:
    """Tell the compiler to make a single graph where cuts at the buckets gain nothing.

    To be called before the first step, in the thread that trains.

    The compiler makes a graph for each bucket of gradients, so that buckets are exchanged while the
    backward pass still runs. No kernel reaches beyond its graph, and the host launches each by
    itself. Kernel by kernel that costs more over NVLink than the overlap saves: a step of ViT-B/16
    on two H100 takes 88.4 ms with the cuts and 84.1 without (docs/inside/benchmarks/buckets.md).
    One process exchanges nothing, and gradients that fit into one bucket, as with
    `tuning.buckets=one`, are exchanged behind the backward pass anyway. With DDP's own size there
    is a small first one, too.
    """
    dynamo = sys.modules.get("torch._dynamo")  # imported by whatever compiles
    if not dynamo or dynamo.config.optimize_ddp is not True:  # the user's choice, not torch's
        return
    at_once = not wrapped.bucket_bytes_cap_default and is_exchanged_at_once(wrapped)
    if ranks() == 1 or at_once or wrapped.bucket_bytes_cap < FIRST_BUCKET_BYTES:
        dynamo.config.optimize_ddp = False
