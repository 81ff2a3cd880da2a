"""Whether torch's compiler cuts a model inside DDP into several graphs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_train.distributed.process_group import from_leader, ranks
from ddp_train.parallel.naming_ddp import BUCKET_MB, exchanged_at_once, requiring_grad

log = logging.getLogger(__name__)

FLOPS_PER_BYTE_SENT = 25_000
"""From so many operations of a step for each byte on, `buckets_by_flops` takes one. At 11,000 it
was 3 % faster to exchange gradients during the backward pass, at 78,000 the cuts cost 2 % more than
that saves; from 19,000 to 56,000 the two differ by 0.3 % (docs/benchmarks/buckets.md: two H100,
bf16)."""
FIRST_BUCKET_BYTES = 2**20
"""DDP's first bucket is this small, so that the exchange begins early. The compiler refuses others
that are smaller."""


def buckets_by_flops(module: nn.Module, step_flops: Callable[[], int | None], device: str) -> str:
    """large or one, keys of `BUCKET_MB`: by how long an exchange takes beside a step. All ranks
    must call it: all count, since a model's forward pass may wait for all, and rank 0's number
    decides. step_flops: see `Strategy.wrap`; large if it knows none; not called if all gradients
    fit into a large bucket. They count as they are, since a hook that compresses them takes as long
    as it saves.

    Raises ModelError for parameters of lazy layers.
    """
    count = ranks()
    own = sum(one.nbytes for one in requiring_grad(module).values())
    gradients = from_leader(own, device) if count > 1 else 0
    if gradients <= BUCKET_MB["large"] * 2**20:
        return "one"
    flops = from_leader(step_flops(), device)
    per_byte = (flops or 0) / (
        2 * (count - 1) / count * gradients
    )  # what each sends in an all-reduce by a ring
    buckets = "one" if per_byte >= FLOPS_PER_BYTE_SENT else "large"
    counted = f"{per_byte:,.0f} operations" if flops else "no known number of operations"
    log.info("tuning.buckets=by_flops: %s, with %s for each byte that is sent", buckets, counted)
    return buckets


def choose_graphs(wrapped: DistributedDataParallel) -> None:
    """To be called before the first step of a model that may be compiled, in the thread that
    trains.

    The compiler makes a graph for each bucket of gradients, so that buckets are exchanged while the
    backward pass still runs. No kernel reaches beyond its graph, and the host launches each by
    itself. Kernel by kernel that costs more over NVLink than the overlap saves: a step of ViT-B/16
    on two H100 takes 88.4 ms with the cuts and 84.1 without (docs/benchmarks/buckets.md). A process
    that is alone exchanges nothing, and gradients that fit into one bucket, as with
    `tuning.buckets=one`, are exchanged behind the backward pass anyway. With DDP's own size there
    is a small first one, too.
    """
    dynamo = sys.modules.get("torch._dynamo")  # imported by whatever compiles
    at_once = not wrapped.bucket_bytes_cap_default and exchanged_at_once(wrapped)
    cut_in_vain = ranks() == 1 or at_once or wrapped.bucket_bytes_cap < FIRST_BUCKET_BYTES
    if (
        dynamo and cut_in_vain and dynamo.config.optimize_ddp is True
    ):  # torch's choice, not the user's
        dynamo.config.optimize_ddp = False
