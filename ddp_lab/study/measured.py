"""Measurements to validate the cost model: of MLPerf Training, from the submitters' own logs, and
this launcher's.

Which log, and what of it (medians over result files, which differ by at most 1.7 %):

- ResNet-50, H100 (MXNet): dgxh100*_ngc23.04_mxnet/resnet/result_0.txt of v3.0. Throughputs of
  epochs after the first;
  64 hosts have none, their seconds are those of a block (5,124,668 samples in 2.461, 2.460 and
  2.453 s).
- RetinaNet, H100: eos*_ngc24.04_pytorch/ssd/result_{0,1}.txt of v4.0. Throughputs of epochs after
  the first and before
  the last, which ends early; they are per GPU (times the GPUs they fit the seconds of an epoch).
  GB200: result_0.txt of
  tyche_ngpu{8,72,512}_ngc25.04_pytorch/retinanet of v5.0, throughputs of all GPUs. Batches:
  1,170,301 images through
  the steps of an epoch, which the log calls train_samples.
- BERT-large: samples from one evaluation to a later one, through the seconds between. The
  evaluations between are in
  them, as the logs of 8 and 64 H100 do not tell them apart; where the logs do, they are 6 % of 8
  H200, 5 % of GB200 and
  1 % of 3,472 H100. result_{0,1,2}.txt of eos_ngc23.04, eos_n8_ngc23.04 and
  eos_n434_ngc23.09_pytorch/bert and {0,1} of
  h200_ngc23.09 (v4.0); {0,1} of Oracle's 8xBM.GPU.H200.8 and of tyche_ngpu8, {0,1,2} of
  tyche_ngpu64 and ngpu512
  (v5.0). Batches: the configs (8x8x72x1: 8 hosts, 8 GPUs, 72 sequences; a pack counts as two), and
  samples by steps.

v3.0 and v4.0 were read in mlcommons/training_results_v3.0 and v4.0 (commits 9f08e30, 62f111b), v5.0
in a copy, prishajain1/training_results_v5.0 (0fdc28f). BERT's gradients are exchanged by apex's
DistributedFusedLAMB: in one block after the backward pass (--dwu-num-blocks=1 in run_and_time.sh),
on 3,472 GPUs in 5 that overlap with it (config_DGXH100_434x8x2x1_pack_clipafter.sh in
mlcommons/training_results_v3.1, f33f944).
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_lab.study.cost_model import Cluster, Link, Step, buckets, predict

RESNET50 = 25_557_032
"""Parameters of torchvision.models.resnet50."""
RETINANET = 36_849_004
"""torchvision's, with ResNeXt-50 32x4d and 264 classes: those with gradients, with three trainable
layers of five."""
BERT_LARGE = 336_232_258
"""Parameters of BERT-large with the heads of pretraining and 30,528 tokens."""
GPT2_124M = 124_475_904
"""50,304 tokens."""

FP16 = 2.0
FP32 = 4.0
"""Bytes of a gradient."""


@dataclass(frozen=True)
class Point:
    """A measured throughput."""

    gpus: int
    global_batch_size: int
    samples_per_second: float
    blocks: int = 0
    """Equal parts in which the gradients are exchanged; 0 for DDP's buckets."""

    @property
    def batch(self) -> float:
        """Samples per GPU."""
        return self.global_batch_size / self.gpus

    @property
    def step_seconds(self) -> float:
        return self.global_batch_size / self.samples_per_second

    @property
    def speed_per_gpu(self) -> float:
        return self.samples_per_second / self.gpus

    def error(self, predicted: float) -> float:
        """The relative error of predicted seconds; above 0 the model is too pessimistic."""
        return predicted / self.step_seconds - 1


@dataclass(frozen=True)
class Series:
    """One network on growing numbers of the same GPU. The first point gives the step of one GPU."""

    name: str
    gradient_bytes: float
    cluster: Cluster
    points: tuple[Point, ...]

    def sizes(self, point: Point) -> list[float]:
        """Bytes of each part of the exchange."""
        if point.blocks:
            return [self.gradient_bytes / point.blocks] * point.blocks
        return buckets(self.gradient_bytes)

    def seconds(self, own: float, point: Point) -> float:
        """The predicted step, if that of one GPU takes `own` seconds."""
        step = Step(own, self.gradient_bytes)
        return predict(step, point.gpus, self.cluster, self.sizes(point)).seconds

    def own_seconds(self, point: Point) -> float:
        """The step of one GPU for which `seconds` gives the measured one (fixed-point
        iteration)."""
        own = point.step_seconds
        for _ in range(50):
            own += point.step_seconds - self.seconds(own, point)
        return own


DGX_H100 = Cluster(
    gpus_per_host=8,
    # 332 GB/s: bus bandwidth of an all-reduce of 100 MiB, measured on eight H200, which have the
    # same NVLink. 3.4, 14 and 8.4 us: NCCL's own figures for rings over NVLink, rings over a
    # network, and a call (src/graph/tuning.cc of NCCL 2.2x, protocol Simple).
    inside=Link(3.4e-6, 332e9),
    # 8 x 400 Gb/s InfiniBand: NVIDIA/systems/*.json of v3.0 and v4.0, Oracle's of v5.0
    between=Link(14e-6, 50e9),
    call_seconds=8.4e-6,
)
NVL72 = Cluster(
    gpus_per_host=72,  # joined by NVLink, whatever hosts they are in
    # twice that of H100: 1,800 GB/s of NVLink instead of 900 (NVIDIA/systems/tyche*.json)
    inside=Link(3.4e-6, 664e9),
    # 4 x 400 Gb/s InfiniBand for 4 GPUs: the same file
    between=Link(14e-6, 50e9),
    call_seconds=8.4e-6,
)

MLPERF = (
    Series(
        "ResNet-50, H100 (v3.0)",
        FP16 * RESNET50,
        DGX_H100,
        (
            Point(8, 3_200, 56_065.0),
            Point(64, 3_200, 294_760.0),
            Point(512, 20_480, 2_084_900.0),
            Point(768, 32_256, 3_412_000.0),
        ),
    ),
    Series(
        "RetinaNet, H100 (v4.0)",
        FP16 * RETINANET,
        DGX_H100,
        (
            Point(8, 256, 2_323.6),
            Point(64, 256, 13_538.4),
            Point(2_528, 2_528, 261_417.0),
        ),
    ),
    Series(
        "RetinaNet, GB200 (v5.0)",
        FP16 * RETINANET,
        NVL72,
        (
            Point(8, 256, 4_031.7),
            Point(72, 288, 23_827.2),
            Point(512, 1_024, 100_188.0),
        ),
    ),
    Series(
        "BERT-large, H100 (v4.0)",
        FP16 * BERT_LARGE,
        DGX_H100,
        (
            Point(8, 768, 7_787.0, 1),
            Point(64, 4_608, 54_925.5, 1),
            Point(3_472, 13_888, 793_073.0, 5),
        ),
    ),
    Series(
        "BERT-large, H200 (v4.0, v5.0)",
        FP16 * BERT_LARGE,
        DGX_H100,
        (
            Point(8, 768, 8_035.0, 1),
            Point(64, 4_608, 58_302.2, 1),
        ),
    ),
    Series(
        "BERT-large, GB200 (v5.0)",
        FP16 * BERT_LARGE,
        NVL72,
        (
            Point(8, 768, 12_014.4, 1),
            Point(64, 4_608, 86_285.4, 1),
            Point(512, 8_192, 230_525.1, 1),
        ),
    ),
)
MLPERF_NOTE = (
    "Throughputs from the logs of MLPerf Training. efficiency: samples per second and GPU,"
    " relative to the first row of the network. The two models differ in the time of a step on"
    " one GPU. proportional: the time of the first row, scaled by the batch per GPU. with a"
    " fixed part: fixed seconds plus seconds per sample, fitted to the first two rows; the other"
    " rows test the model. Waiting for the slowest rank is left out, since no deviation of steps"
    ' is published. The page "Studies" of the documentation says what the errors mean.'
)
OURS = (
    # docs/inside/benchmarks/speed.md: bf16, tuning=max, the best of two runs;
    # docs/inside/benchmarks/gpt2.md: recommended, windows of 1,024 tokens, 2026-11-22, one run each
    # on two machines; tuning=max, one graph, 2026-11-25, one run each on one.
    Series(
        "ResNet-50, H200",
        FP32 * RESNET50,
        DGX_H100,
        (Point(1, 256, 6_754.0), Point(4, 1_024, 26_231.0)),
    ),
    Series(
        "GPT-2 124M, H200",
        FP32 * GPT2_124M,
        DGX_H100,
        (Point(1, 64, 499.52), Point(2, 128, 988.26)),
    ),
    Series(
        "GPT-2 124M, H100",
        FP32 * GPT2_124M,
        DGX_H100,
        (Point(1, 64, 489.93), Point(2, 128, 947.43, blocks=1)),
    ),
)

OUR_NOTE = (
    "From the benchmarks of speed and of GPT-2 in the documentation. GPT-2 on H200 ran on one"
    " GPU and on two GPUs of different machines, which differ by 2 to 3 %. On H100 it ran on one"
    " machine, where all gradients are exchanged after the backward pass. It never ran on four"
    " GPUs."
)


@dataclass(frozen=True)
class Check:
    """A measured point and its predictions, in seconds; None where the point itself was used for
    it."""

    series: Series
    point: Point
    proportional: float | None = None
    """One GPU's step is that of the first point, times the ratio of the batches per GPU."""
    with_fixed: float | None = None
    """Fixed seconds and seconds per sample are a line through the first two points."""

    @property
    def efficiency(self) -> float:
        """Samples per second and GPU, as a fraction of those of the first point."""
        return self.point.speed_per_gpu / self.series.points[0].speed_per_gpu


def checks(series: Series) -> list[Check]:
    """The checks of all points. If there are only two points, none is left to test a line."""
    first, second, *_ = series.points
    own = series.own_seconds(first)
    found = [Check(series, first)]
    for number, point in enumerate(series.points[1:]):
        proportional = series.seconds(own * point.batch / first.batch, point)
        with_fixed = None
        if number:
            per_sample = (own - series.own_seconds(second)) / (first.batch - second.batch)
            line = own + per_sample * (point.batch - first.batch)
            with_fixed = series.seconds(line, point)
        found.append(Check(series, point, proportional, with_fixed))
    return found
