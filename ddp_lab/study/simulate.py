"""`study=simulate`: predicts how a measured step scales to any number of GPUs; measures the host
work of a rank."""

from __future__ import annotations

import itertools
import json
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
from ddp_lab.study.request import Request, bind_settings, raise_problems
from ddp_lab.study.run_step import measured_step
from ddp_lab.study.trials import lock_run_dir
from ddp_train.distributed.child_environments import environment
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

    def step(self) -> Step:
        """The step of one GPU. Raises ConfigError if the run does not show it."""
        if self.from_run:
            step = measured_step(Path(self.from_run))
        else:
            assert self.step_ms and self.gradient_mb
            step = Step(
                seconds=1e-3 * self.step_ms,
                gradient_bytes=1e6 * self.gradient_mb,
                deviation_seconds=1e-3 * self.deviation_ms,
            )
        return replace(step, backward_share=self.backward_share)


def study(request: Request) -> tuple[Report, int]:
    """Predict without training. Returns the report and the exit code. Raises ConfigError without a
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
        problems.append(
            f"study.gpus={shown(config.gpus)}: must be numbers of at least 1; use"
            " 'study.gpus=[2,4,8]'"
        )
    raise_problems(problems)
    step = config.step()
    lock_run_dir(request)
    return report(step, config, request), 0


def report(step: Step, config: SimulateConfig, request: Request) -> Report:
    """The report: predictions, validation against MLPerf, and the dry plan, which is measured in
    new processes."""
    sizes = buckets(step.gradient_bytes, cap=config.bucket_cap_mb * 2**20)
    cluster = config.cluster()
    predictions = [predict(step, count, cluster, sizes) for count in config.gpus]
    sections: list[Table | Plot] = [
        prediction_table(step, predictions, config.gpus_per_host),
        *comparisons(),
    ]
    if config.dry_plan:
        sections.append(dry_plans(request.program.presets.parents[1]))
    sections.append(_plot(step, predictions))
    return Report(
        "Predicted scaling",
        f"A step on one GPU takes {1e3 * step.seconds:.4g} ms (standard deviation"
        f" {1e3 * step.deviation_seconds:.2g} ms), its gradients have"
        f" {step.gradient_bytes / 1e6:.4g} MB. Weak scaling: every GPU has the same number of"
        " samples.",
        sections,
        provenance(),
        [request.command],
    )


def prediction_table(step: Step, predictions: Sequence[Prediction], gpus_per_host: int) -> Table:
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
    rows: list[list[Any]] = [
        [
            predicted.gpus,
            -(-predicted.gpus // gpus_per_host),
            1e3 * predicted.seconds,
            100 * step.seconds / predicted.seconds,
            1e3 * predicted.exchange,
            1e3 * predicted.exposed,
            1e3 * predicted.waiting,
        ]
        for predicted in predictions
    ]
    note = (
        "exchange: all-reduce in DDP's buckets, by a ring inside each host and the faster of"
        " ring and trees between hosts. exposed: the part of the exchange that does not overlap"
        " with the backward pass. waiting: for the slowest rank, assuming independent"
        " exponential delays. Not modelled: slow data loading, other traffic on the network, a"
        " GPU that is always slower, and the cost of dividing a compiled graph at DDP's buckets."
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
    columns = [
        "network",
        "GPUs",
        "batch per GPU",
        "measured step, ms",
        "efficiency, %",
        "proportional, ms",
        "proportional, error in %",
        "with a fixed part, ms",
        "with a fixed part, error in %",
    ]
    rows: list[list[Any]] = []
    for check in itertools.chain.from_iterable(map(measured.checks, series)):
        point = check.point
        row = [check.series.name, point.gpus, round(point.batch), 1e3 * point.step_seconds]
        row.append(100 * check.efficiency)
        for seconds in (check.proportional, check.with_fixed):
            if seconds is None:
                row += [None, None]
            else:
                row += [1e3 * seconds, 100 * point.error(seconds)]
        rows.append(row)
    if not any(row[-1] for row in rows):
        columns = columns[:-2]
        rows = [row[:-2] for row in rows]
    return Table(title, columns, rows, note)


DRY_PLAN_COLUMNS: dict[str, tuple[int, str, float]] = {
    "order of an epoch, ms": (0, "seconds", 1e3),
    "micro-batches of a step, us": (1, "seconds", 1e6),
    "of a step, bytes": (1, "bytes", 1),
    "of an evaluation, us": (2, "seconds", 1e6),
    "loss at a logging interval, ms": (3, "seconds", 1e3),
    "checkpoint, group norm, us": (4, "seconds", 1e6),
    "checkpoint, batch norm, ms": (5, "seconds", 1e3),
    "checkpoint, batch norm, MB": (5, "bytes", 1e-6),
}
"""Columns of the table: place of the cost in `dry_plan.measure`, what of it, and the factor of the
unit."""


def dry_plans(folder: Path, ranks: Sequence[int] = RANKS) -> Table:
    """Measure the host work of rank 0 for each number of ranks, in new processes.

    folder: where this package lies.
    """
    columns = ["ranks", *DRY_PLAN_COLUMNS, "failed"]
    rows: list[list[Any]] = []
    for count in ranks:
        process = subprocess.run(
            [sys.executable, "-m", DRY_PLAN, str(count)],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            preexec_fn=end_with_parent,  # safe: this process has one thread
        )
        cells: list[Any] = [None] * len(DRY_PLAN_COLUMNS)
        failure = ""
        if process.returncode:
            last_line = process.stderr.strip().splitlines()[-1:]
            failure = "; ".join([f"exit code {process.returncode}", *last_line])
        else:
            costs = json.loads(process.stdout)
            cells = [
                costs[place][name] * factor for place, name, factor in DRY_PLAN_COLUMNS.values()
            ]
        rows.append([count, *cells, failure])
    if not any(row[-1] for row in rows):
        columns.pop()
        rows = [row[:-1] for row in rows]
    note = (
        "On rank 0: ImageNet, 32 samples per rank and step, torch's fake process group, in which"
        " communication takes no time. The cost of micro-batches does not depend on the number of"
        f" ranks. That of data gathered from all ranks does: the losses of the {LOG_EVERY_STEPS}"
        " steps of a logging interval, and at a checkpoint the statistics of batch norm (here of"
        " 1,000 channels; ResNet-50 has 26,560)."
    )
    return Table("Host work of rank 0", columns, rows, note)


def _plot(step: Step, predictions: Sequence[Prediction]) -> Plot:
    gpus = [predicted.gpus for predicted in predictions]
    percents = [100 * step.seconds / predicted.seconds for predicted in predictions]
    lines = [Curve("predicted", gpus, percents)]
    if any(predicted.waiting for predicted in predictions):
        percents = [
            100 * step.seconds / (predicted.seconds - predicted.waiting)
            for predicted in predictions
        ]
        lines.append(Curve("without waiting for the slowest", gpus, percents, dashed=True))
    svg = curves(lines, Axis("GPUs", log=True), Axis("efficiency, %"))
    return Plot("Efficiency", svg, "100 %: every GPU is as fast as a single one.")
