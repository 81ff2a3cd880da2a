"""Whether torch's compiler cuts a model inside DDP into several graphs."""

from __future__ import annotations

import sys

from torch.nn.parallel import DistributedDataParallel

from ddp_train.distributed.process_group import ranks
from ddp_train.parallel.naming_ddp import exchanged_at_once

FIRST_BUCKET_BYTES = 2**20
"""DDP's first bucket is this small, so that the exchange begins early. The compiler refuses others that are smaller."""


def choose_graphs(wrapped: DistributedDataParallel) -> None:
    """To be called before the first step of a model that may be compiled, in the thread that trains.

    The compiler makes a graph for each bucket of gradients, so that buckets are exchanged while the backward pass still
    runs. No kernel reaches beyond its graph, and the host launches each by itself. Kernel by kernel that costs more
    over NVLink than the overlap saves: a step of ViT-B/16 on two H100 takes 88.4 ms with the cuts and 84.1 without
    (docs/benchmarks/buckets.md). A process that is alone exchanges nothing, and gradients that fit into one bucket,
    as with `tuning.buckets=one`, are exchanged behind the backward pass anyway. With DDP's own size there is a small
    first one, too.
    """
    dynamo = sys.modules.get("torch._dynamo")  # imported by whatever compiles
    at_once = not wrapped.bucket_bytes_cap_default and exchanged_at_once(wrapped)
    cut_in_vain = ranks() == 1 or at_once or wrapped.bucket_bytes_cap < FIRST_BUCKET_BYTES
    if dynamo and cut_in_vain and dynamo.config.optimize_ddp is True:  # torch's choice, not the user's
        dynamo.config.optimize_ddp = False
