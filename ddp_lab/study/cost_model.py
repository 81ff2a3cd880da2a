"""A model of the time of a training step on N GPUs, from that of one GPU: alpha-beta costs, DDP's
buckets, stragglers.

A message of n bytes takes alpha + n / bandwidth. All-reduce of n bytes over p ranks, as a ring: 2
(p - 1) messages of n / p each (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009; Thakur,
Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19, 2005); as a pair of binary trees
that are kept full: 2 log2(p) latencies and 2 n bytes through each rank (Sanders, Speck and Traeff,
Parallel Computing 35, 2009), which is NCCL's choice between many hosts. Arithmetic only: starts no
process, does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FIRST_BUCKET_BYTES = 2**20
"""DDP's first bucket is small, so that communication begins early
(torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)."""
BUCKET_BYTES = 25 * 2**20
"""Default of DDP's bucket_cap_mb."""
BACKWARD_SHARE = 2 / 3
"""Fraction of a step, where it was not measured: the backward pass has two matrix products for each
of the forward pass (arXiv:2001.08361, section 2.1)."""


@dataclass(frozen=True)
class Link:
    """A link from one GPU to the next."""

    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Cluster:
    """Equal hosts with equal GPUs."""

    gpus_per_host: int
    inside: Link
    between: Link
    """The part of its host's network that each GPU has."""
    call_seconds: float = 0.0
    """Fixed cost of one collective call."""


@dataclass(frozen=True)
class Step:
    """The step of one GPU without communication."""

    seconds: float
    gradient_bytes: float
    backward_share: float = BACKWARD_SHARE
    deviation_seconds: float = 0.0
    """Standard deviation of `seconds` from step to step."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of one step on N GPUs, and their parts."""

    gpus: int
    seconds: float
    exchange: float
    """All-reduce of all buckets, overlapped or not."""
    exposed: float
    """The part of the exchange that does not overlap with the backward pass."""
    waiting: float
    """Waiting for the slowest of N ranks."""


def ring(size: float, ranks: int, link: Link) -> float:
    """Seconds of an all-reduce of `size` bytes as a ring."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) * (link.latency_seconds + size / ranks / link.bytes_per_second)


def double_tree(size: float, ranks: int, link: Link) -> float:
    """Seconds of an all-reduce of `size` bytes as two binary trees, each for half of it."""
    if ranks == 1:
        return 0.0
    return 2 * math.ceil(math.log2(ranks)) * link.latency_seconds + 2 * size / link.bytes_per_second


def all_reduce(size: float, gpus: int, cluster: Cluster) -> float:
    """Seconds of an all-reduce of `size` bytes: a ring inside each host; between hosts, GPUs with
    the same local rank exchange their part by ring or trees, whichever is faster."""
    if gpus == 1:
        return 0.0
    local = min(gpus, cluster.gpus_per_host)
    hosts = -(-gpus // cluster.gpus_per_host)
    part = size / local
    between = min(ring(part, hosts, cluster.between), double_tree(part, hosts, cluster.between))
    return cluster.call_seconds + ring(size, local, cluster.inside) + between


def buckets(
    size: float, first: float = FIRST_BUCKET_BYTES, cap: float = BUCKET_BYTES
) -> list[float]:
    """The bytes of DDP's buckets, in the order in which they become ready."""
    sizes = [min(first, size)]
    while sum(sizes) < size:
        sizes.append(min(cap, size - sum(sizes)))
    return sizes


def exchange_end(
    sizes: Sequence[float], gpus: int, cluster: Cluster, forward: float, backward: float
) -> float:
    """Seconds from the start of the step until the last bucket is exchanged.

    Assumes that the backward pass produces gradients at a constant rate, and that buckets are
    exchanged one at a time.
    """
    ready = forward + backward * np.cumsum(sizes) / sum(sizes)
    end = 0.0
    for size, begins in zip(sizes, ready, strict=True):
        end = max(end, float(begins)) + all_reduce(size, gpus, cluster)
    return end


def expected_wait(deviation: float, ranks: int) -> float:
    """Expected delay of the last of N ranks behind the mean, for independent exponential delays.

    Disturbances of a step (other processes, clocks, retries) make it longer, never shorter: a
    minimal time plus a delay. Of all distributions of a positive delay with a known mean the
    exponential one says least beyond it (maximum entropy), and its tail is the heaviest with which
    waiting grows as the logarithm of N (Agarwal, Garg and Vishnoi, HiPC 2005): the expected maximum
    of N is the mean times 1 + 1/2 + ... + 1/N, and the mean is the standard deviation.
    """
    return deviation * float(np.sum(1 / np.arange(2, ranks + 1)))


def predict(
    step: Step, gpus: int, cluster: Cluster, sizes: Sequence[float] | None = None
) -> Prediction:
    """A step on `gpus` GPUs with the same number of samples on each (weak scaling).

    sizes: bytes of the parts in which the gradients are exchanged, in the order in which they
    become ready; those of DDP's buckets if None. One part is exchanged after the backward pass.
    """
    sizes = buckets(step.gradient_bytes) if sizes is None else sizes
    backward = step.seconds * step.backward_share
    # the other half of the rest: optimizer and data, after the exchange
    forward = (step.seconds - backward) / 2
    end = exchange_end(sizes, gpus, cluster, forward, backward)
    exposed = max(0.0, end - forward - backward)
    waiting = expected_wait(step.deviation_seconds, gpus)
    exchange = sum(all_reduce(size, gpus, cluster) for size in sizes)
    return Prediction(gpus, step.seconds + exposed + waiting, exchange, exposed, waiting)
