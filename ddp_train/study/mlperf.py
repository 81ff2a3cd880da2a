"""Published measurements to validate the cost model: ResNet-50 of MLPerf Training 3.0 on 8 to 768 H100.

Each is read from the submitter's own log, NVIDIA/results/dgxh100*_ngc23.04_mxnet/resnet/result_0.txt in
https://github.com/mlcommons/training_results_v3.0 (commit 9f08e30): global_batch_size, and samples per second over
epochs after the first. With 64 hosts the log has no throughput of an epoch, so the seconds are those from the first
epoch of a block to the evaluation after it (5,124,668 samples in 2.461, 2.460 and 2.453 s); with 1, 8 and 96 hosts it
is the median of the log's throughputs. The batch per GPU differs between the points, and so does the step time of one
GPU: a line through the two smallest points gives it, and the two largest points are the test.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_train.study.cost_model import BACKWARD_SHARE, Cluster, Link, Step, predict, single_gpu_seconds

SOURCE = "MLPerf Training 3.0, NVIDIA DGX H100, ResNet-50 v1.5, https://github.com/mlcommons/training_results_v3.0"
PARAMETERS = 25_557_032
"""torchvision.models.resnet50."""
GRADIENT_BYTES = 2.0 * PARAMETERS
"""In float16."""


@dataclass(frozen=True)
class Published:
    gpus: int
    global_batch_size: int
    samples_per_second: float

    @property
    def batch(self) -> float:
        """Samples per GPU."""
        return self.global_batch_size / self.gpus

    @property
    def step_seconds(self) -> float:
        return self.global_batch_size / self.samples_per_second


POINTS = (
    Published(8, 3_200, 56_065.0),
    Published(64, 3_200, 294_760.0),
    Published(512, 20_480, 2_084_900.0),
    Published(768, 32_256, 3_412_000.0),
)
DGX_H100 = Cluster(
    gpus_per_host=8,
    # 332 GB/s: bus bandwidth of an all-reduce of 100 MiB, measured on eight H200, which have the same NVLink. 3.4, 14
    # and 8.4 us: NCCL's own figures for rings over NVLink, rings over a network, and a call (src/graph/tuning.cc of
    # NCCL 2.2x, protocol Simple).
    inside=Link(3.4e-6, 332e9),
    between=Link(14e-6, 50e9),  # 8 x 400 Gb/s InfiniBand: NVIDIA/systems/dgxh100_n64_ngc23.04_mxnet.json, same source
    call_seconds=8.4e-6,
)


@dataclass(frozen=True)
class Check:
    """A published point and its prediction. `error` is 0 by construction for the points of the fit."""

    point: Published
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative error of the predicted seconds; above 0 the model is too pessimistic."""
        return self.predicted / self.point.step_seconds - 1


def checks(cluster: Cluster = DGX_H100, backward_share: float = BACKWARD_SHARE) -> list[Check]:
    """All points. The first two fit the step of one GPU: fixed seconds, and seconds per sample."""
    few, more = POINTS[:2]
    own = [single_gpu_seconds(p.step_seconds, p.gpus, GRADIENT_BYTES, cluster, backward_share) for p in (few, more)]
    per_sample = (own[0] - own[1]) / (few.batch - more.batch)
    fixed = own[0] - per_sample * few.batch
    found = []
    for point in POINTS:
        step = Step(fixed + per_sample * point.batch, GRADIENT_BYTES, backward_share)
        found.append(Check(point, predict(step, point.gpus, cluster).seconds, point in (few, more)))
    return found
