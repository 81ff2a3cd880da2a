"""Whether torch's compiler cuts a model inside DDP into several graphs."""

from __future__ import annotations

import sys

from torch.nn.parallel import DistributedDataParallel

from ddp_train.distributed.process_group import ranks

FIRST_BUCKET_BYTES = 2**20
"""DDP's first bucket is this small, so that the exchange begins early. The compiler refuses others that are smaller."""


def choose_graphs(wrapped: DistributedDataParallel) -> None:
    """To be called before the first step of a model that may be compiled, in the thread that trains.

    The compiler makes a graph for each bucket of gradients, so that buckets are exchanged while the backward pass still
    runs. A process that is alone exchanges none, and no kernel reaches beyond its graph: ViT-B/16 (14 graphs) took 77.5
    ms of kernels on an H200, and 74.2 as one graph without DDP (docs/benchmarks/models.md).
    """
    dynamo = sys.modules.get("torch._dynamo")  # imported by whatever compiles
    cut_in_vain = ranks() == 1 or wrapped.bucket_bytes_cap < FIRST_BUCKET_BYTES
    if dynamo and cut_in_vain and dynamo.config.optimize_ddp is True:  # torch's choice, not the user's
        dynamo.config.optimize_ddp = False
