"""`study=simulate`: predicts how a measured step scales to any number of GPUs; measures the host
work of a rank."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_lab.study import measured
from ddp_lab.study.cost_model import (
    BACKWARD_SHARE,
    Cluster,
    Link,
    Prediction,
    Step,
    buckets,
    predict,
)
from ddp_lab.study.provenance import provenance
from ddp_lab.study.request import Request, bind_settings
from ddp_lab.study.trials import lock_run_dir
from ddp_train.distributed.child_environments import environment
from ddp_train.errors import ConfigError
from ddp_train.linux import end_with_parent
from ddp_train.options.key import key
from ddp_train.telemetry.pages.charts import Axis, Curve, curves
from ddp_train.telemetry.pages.report import Plot, Report
from ddp_train.telemetry.pages.tables import Table
from ddp_train.text import shown

DRY_PLAN = "ddp_lab.study.dry_plan"
RANKS = (1, 64, 4096)
LOG_EVERY_STEPS = 50
"""Logging interval in the dry plan."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of batch norm, which are stored with the weights of a checkpoint but have no gradient."""


@dataclass
class SimulateConfig:
    """conf/study/simulate.yaml. Latencies in microseconds and bandwidths in GB/s, as in data sheets
    and nccl-tests."""

    kind: str = key("simulate", "the kind of study", choices=("simulate",))
    from_run: str | None = key(
        None, "run directory of a run with one process, whose metrics give the step time"
    )
    step_ms: float | None = key(None, "instead of from_run: step time of one GPU, in ms", above=0)
    deviation_ms: float = key(
        0.0, "with step_ms: standard deviation of the step time, in ms", at_least=0
    )
    gradient_mb: float | None = key(
        None, "with step_ms: size of the gradients, in 10^6 bytes", above=0
    )
    backward_share: float = key(
        BACKWARD_SHARE, "fraction of a step that the backward pass takes", above=0, below=1
    )
    bucket_cap_mb: float = key(
        25.0, "size of DDP's buckets, in MiB, as strategy.bucket_cap_mb", above=0
    )
    gpus: list[int] = key([1, 2, 4, 8, 16, 64, 256, 1024, 4096], "numbers of GPUs to predict")
    gpus_per_host: int = key(8, "GPUs in each host", at_least=1)
    inside_gb_per_second: float = key(
        332.0, "bus bandwidth of an all-reduce inside a host", above=0
    )
    inside_microseconds: float = key(3.4, "latency of a message inside a host", at_least=0)
    between_gb_per_second: float = key(
        50.0, "network bandwidth between hosts for each GPU", above=0
    )
    between_microseconds: float = key(14.0, "latency of a message between hosts", at_least=0)
    call_microseconds: float = key(8.4, "fixed cost of a collective", at_least=0)
    dry_plan: bool = key(True, "measure the host work of rank 0 in worlds of 1, 64 and 4,096 ranks")

    def cluster(self) -> Cluster:
        inside = Link(self.inside_microseconds * 1e-6, self.inside_gb_per_second * 1e9)
        between = Link(self.between_microseconds * 1e-6, self.between_gb_per_second * 1e9)
        return Cluster(self.gpus_per_host, inside, between, self.call_microseconds * 1e-6)


def study(request: Request) -> tuple[Report, int]:
    """Predicts without training. Returns the report and the exit code. Raises ConfigError without a
    measured step."""
    config: SimulateConfig = bind_settings(SimulateConfig, request.settings)
    problems = [
        f"{override}: study=simulate trains nothing, so it has no effect; leave it out"
        for override in request.overrides
    ]
    if (config.from_run is None) == (config.step_ms is None or config.gradient_mb is None):
        problems.append(
            f"study.from_run={shown(config.from_run)}: give either study.from_run=RUN_DIR, or"
            " study.step_ms and study.gradient_mb"
        )
    if not config.gpus or min(config.gpus) < 1:
        problems.append(f"study.gpus={config.gpus}: must be numbers of at least 1")
    if problems:
        raise ConfigError(problems)
    if config.from_run:
        step = replace(measured_step(Path(config.from_run)), backward_share=config.backward_share)
    else:
        seconds = 1e-3 * (config.step_ms or 0.0)
        spread = 1e-3 * config.deviation_ms
        step = Step(seconds, 1e6 * (config.gradient_mb or 0.0), config.backward_share, spread)
    lock_run_dir(request)
    return report(step, config, request), 0


def measured_step(run_dir: Path) -> Step:
    """The step of a run of one process, from its metrics: the median of its logging intervals
    without the first one and without those in which an epoch ended with a smaller batch.

    Raises ConfigError if the run had several processes, or too few intervals, or no checkpoint to
    know the model by.
    """
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            [
                f"study.from_run={run_dir}: not a completed run ({error}); use the run_dir of a"
                " completed run"
            ]
        ) from None
    if summary["world_size"] != 1:
        what = f"a run of {summary['world_size']} processes, whose steps include communication"
        raise ConfigError(
            [f"study.from_run={run_dir}: {what}; use a run with launch.nproc_per_node=1"]
        )
    intervals = whole_intervals(lines, summary["global_batch_size"])
    if len(intervals) < 3:
        few = (
            f"{len(intervals)} logging intervals of whole batches after the first, at least 3 are"
            " needed"
        )
        remedy = "use a longer run, or a lower train.log_every_steps"
        raise ConfigError([f"study.from_run={run_dir}: {few}; {remedy}"])
    seconds = statistics.median(mean for _, mean in intervals)
    return Step(seconds, gradient_bytes(run_dir), deviation_seconds=deviation(intervals))


def whole_intervals(lines: Sequence[dict[str, Any]], batch: int) -> list[tuple[int, float]]:
    """(number of steps, mean seconds of a step) of each logging interval in which all batches were
    whole, except the first interval.

    lines: of metrics.jsonl. Intervals differ in length, since they also end at the end of an epoch.
    """
    train_lines = [line for line in lines if line["kind"] == "train"]
    found = []
    for before, line in itertools.pairwise(train_lines):
        steps = line["step"] - before["step"]
        if line["samples_seen"] - before["samples_seen"] == steps * batch:
            found.append((steps, batch / line["samples_per_second"]))
    return found


def deviation(intervals: Sequence[tuple[int, float]]) -> float:
    """The standard deviation of one step, from means over k steps, whose variance is 1 / k of that
    of a step."""
    steps = sum(count for count, _ in intervals)
    mean = sum(count * seconds for count, seconds in intervals) / steps
    return math.sqrt(
        sum(count * (seconds - mean) ** 2 for count, seconds in intervals) / (len(intervals) - 1)
    )


def gradient_bytes(run_dir: Path) -> float:
    """Bytes of all parameters, from the header of the newest checkpoint (safetensors: its length,
    then JSON).

    Raises ConfigError if there is no checkpoint.
    """
    weights = sorted(run_dir.glob("checkpoints/step_????????/model.safetensors"))
    if not weights:
        raise ConfigError(
            [
                f"study.from_run={run_dir}: has no checkpoint, which holds the size of the model;"
                " use a run with one"
            ]
        )
    with weights[-1].open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    spans = [
        e["data_offsets"]
        for name, e in tensors.items()
        if name.rpartition(".")[2] not in STATISTICS
    ]
    return float(sum(end - start for start, end in spans))


def report(step: Step, config: SimulateConfig, request: Request) -> Report:
    """The report: predictions, validation against MLPerf, and the dry plan, which is measured in
    new processes."""
    sections: list[Table | Plot] = [predictions(step, config), *comparisons()]
    if config.dry_plan:
        sections.append(dry_plans(request.program.presets.parents[1]))
    return Report(
        "Predicted scaling",
        f"A step on one GPU takes {1e3 * step.seconds:.4g} ms (standard deviation"
        f" {1e3 * step.deviation_seconds:.2g} ms), its gradients have"
        f" {step.gradient_bytes / 1e6:.4g} MB. Weak scaling: every GPU has the same number of"
        " samples.",
        [*sections, _plot(step, config)],
        provenance(),
        [request.command],
    )


def _predicted(step: Step, config: SimulateConfig) -> list[Prediction]:
    cluster = config.cluster()
    sizes = buckets(step.gradient_bytes, cap=config.bucket_cap_mb * 2**20)
    return [predict(step, count, cluster, sizes) for count in config.gpus]


def predictions(step: Step, config: SimulateConfig) -> Table:
    """The predicted steps, a row for each number of GPUs."""
    columns = [
        "GPUs",
        "hosts",
        "step, ms",
        "efficiency, %",
        "exchange, ms",
        "exposed, ms",
        "waiting, ms",
    ]
    rows = []
    for found in _predicted(step, config):
        hosts = -(-found.gpus // config.gpus_per_host)
        parts = [1e3 * part for part in (found.exchange, found.exposed, found.waiting)]
        rows.append(
            [found.gpus, hosts, 1e3 * found.seconds, 100 * step.seconds / found.seconds, *parts]
        )
    note = (
        "exchange: all-reduce in DDP's buckets, by a ring inside each host and the faster of ring"
        " and trees between hosts. exposed: the part of it that does not overlap with the backward"
        " pass. waiting: for the slowest rank, assuming independent exponential delays. Not"
        " modelled: slow data loading, other traffic on the network, a GPU that is always slower,"
        " what the cuts of torch's compiler at buckets cost."
    )
    return Table("Predicted", columns, rows, note)


def comparisons() -> list[Table]:
    """The cost model compared with published and with our own measurements."""
    return [
        compared("Cost model compared with MLPerf", measured.MLPERF, measured.MLPERF_NOTE),
        compared("Cost model compared with our own measurements", measured.OURS, measured.OUR_NOTE),
    ]


def compared(title: str, series: Sequence[measured.Series], note: str) -> Table:
    """The cost model compared with measurements, a row for each."""
    columns = ["network", "GPUs", "batch per GPU", "measured step, ms", "efficiency, %"]
    columns += [
        f"{way}, {unit}"
        for way in ("proportional", "with a fixed part")
        for unit in ("ms", "error in %")
    ]
    rows = []
    for check in itertools.chain.from_iterable(map(measured.checks, series)):
        row = [
            check.series.name,
            check.point.gpus,
            round(check.point.batch),
            1e3 * check.point.step_seconds,
        ]
        row.append(100 * check.efficiency)
        for predicted in (check.proportional, check.with_fixed):
            error = check.error(predicted)
            row += (
                [None, None]
                if predicted is None or error is None
                else [1e3 * predicted, 100 * error]
            )
        rows.append(row)
    if not any(row[-1] for row in rows):
        columns = columns[:-2]
        rows = [row[:-2] for row in rows]
    return Table(title, columns, rows, note)


def dry_plans(folder: Path, ranks: Sequence[int] = RANKS) -> Table:
    """Measures the host work of rank 0 for each number of ranks, in new processes. folder: where
    this package lies."""
    columns = ["ranks", "order of an epoch, ms", "micro-batches of a step, us", "of a step, bytes"]
    columns += [
        "of an evaluation, us",
        "loss at a logging interval, ms",
        "checkpoint, group norm, us",
    ]
    columns += ["checkpoint, batch norm, ms", "checkpoint, batch norm, MB", "failed"]
    rows: list[list[Any]] = []
    for count in ranks:
        ran = subprocess.run(
            [sys.executable, "-m", DRY_PLAN, str(count)],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            preexec_fn=end_with_parent,  # safe: this process has one thread
        )
        if ran.returncode:
            last_line = ran.stderr.strip().splitlines()[-1:]
            reason = "; ".join([f"exit code {ran.returncode}", *last_line])
            rows.append([count, *[None] * (len(columns) - 2), reason])
            continue
        order, micro_batches, evaluation, loss, group_norm, batch_norm = json.loads(ran.stdout)
        rows.append(
            [count, 1e3 * order["seconds"], 1e6 * micro_batches["seconds"], micro_batches["bytes"]]
        )
        rows[-1] += [1e6 * evaluation["seconds"], 1e3 * loss["seconds"]]
        rows[-1] += [
            1e6 * group_norm["seconds"],
            1e3 * batch_norm["seconds"],
            batch_norm["bytes"] / 1e6,
            "",
        ]
    if not any(row[-1] for row in rows):
        columns = columns[:-1]
        rows = [row[:-1] for row in rows]
    note = (
        "On rank 0: ImageNet, 32 samples per rank and step, torch's fake process group, in which"
        " communication takes no time. The cost of micro-batches does not depend on the number of"
        f" ranks. That of data gathered from all ranks does: the losses of the {LOG_EVERY_STEPS}"
        " steps of a logging interval, and at a checkpoint the statistics of batch norm (here of"
        " 1,000 channels; ResNet-50 has 26,560)."
    )
    return Table("Host work of rank 0", columns, rows, note)


def _plot(step: Step, config: SimulateConfig) -> Plot:
    found = _predicted(step, config)
    lines = [Curve("predicted", config.gpus, [100 * step.seconds / one.seconds for one in found])]
    if any(one.waiting for one in found):
        alone = [100 * step.seconds / (one.seconds - one.waiting) for one in found]
        lines.append(Curve("without waiting for the slowest", config.gpus, alone, dashed=True))
    svg = curves(lines, Axis("GPUs", log=True), Axis("efficiency, %"))
    return Plot("Efficiency", svg, "100 %: every GPU is as fast as a single one.")
