"""`study=scaling`: weak and strong scaling over 1, 2, 4 ... processes: efficiency, step breakdown,
bottleneck."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import numpy as np

from ddp_lab.study.provenance import load_at_start, provenance
from ddp_lab.study.request import Request, bind_settings, key_of, resolve_run, this_hardware
from ddp_lab.study.results import interval_samples_per_second
from ddp_lab.study.trials import TRAIN_ONLY, Outcome, Trial, run_or_load, trial_session
from ddp_train.errors import ConfigError, LaunchError
from ddp_train.hardware import Hardware
from ddp_train.options.key import AUTO, key
from ddp_train.resilience.preemption import UNSAVED
from ddp_train.telemetry.pages.charts import Axis, Curve, curves
from ddp_train.telemetry.pages.report import Plot, Report
from ddp_train.telemetry.pages.tables import Table
from ddp_train.text import counted

PARTS = ("data", "compute", "exposed", "host")
"""Names of the parts in the files of `step_times`."""
SIGNIFICANT_SHARE = 0.1
"""Fraction of a step from which a part is reported as a bottleneck."""
THREADS = "launch.threads_per_process"
STEP_TIMES = "ddp_lab.study.step_times.StepTimes"


@dataclass
class ScalingConfig:
    """conf/study/scaling.yaml."""

    kind: str = key("scaling", "the kind of study", choices=("scaling",))
    processes: Union[int, str] = key(
        "auto",
        "largest number of processes; auto: one per GPU, or one per core without GPUs",
        at_least=1,
        **AUTO,
    )
    steps: int = key(60, "optimizer steps of each run", at_least=20)
    repeats: int = key(1, "runs of each number of processes and batch", at_least=1)


@dataclass(frozen=True)
class StepBreakdown:
    """Seconds of a step by part: means over ranks and over the middle half of the steps."""

    data: float
    compute: float
    exchange: float
    """Gradient exchange that does not overlap with the backward pass: the wait of the last rank."""
    waiting: float
    """For slower ranks, before the exchange begins."""
    host: float
    slowest: int
    """The rank that was last most often."""
    slowest_share: float
    """Fraction of the steps in which it was last."""
    gpu_waits_for_host: float | None

    @property
    def step(self) -> float:
        return self.data + self.compute + self.exchange + self.waiting + self.host


def read_breakdown(run_dir: Path) -> StepBreakdown:
    """The breakdown from the files of all ranks of a run with
    `hooks=[ddp_lab.study.step_times.StepTimes]`."""
    files = sorted(
        run_dir.glob("probe/step_times_rank_*.json"),
        key=lambda path: int(path.stem.rpartition("_")[2]),
    )
    ranks = [json.loads(path.read_text()) for path in files]
    seconds = np.array(
        [[[step[part] for part in PARTS] for step in rank["steps"]] for rank in ranks]
    )
    seconds = seconds[
        :, seconds.shape[1] // 4 :
    ]  # warm-up: choice of kernels, layout of buckets, allocation
    # All ranks have steps of the same length, since they wait for each other: sort by the mean over
    # ranks.
    order = seconds.sum(2).mean(0).argsort()
    cut = len(order) // 4
    kept = seconds[:, order[cut : len(order) - cut]]
    exposed = kept[:, :, PARTS.index("exposed")]
    exchange = exposed.min(0)
    data, compute, _, host = kept.mean((0, 1))
    last = np.bincount(exposed.argmin(0), minlength=len(ranks))
    shares = [
        rank["gpu_waits_for_host"] for rank in ranks if rank["gpu_waits_for_host"] is not None
    ]
    return StepBreakdown(
        data=float(data),
        compute=float(compute),
        exchange=float(exchange.mean()),
        waiting=float((exposed - exchange).mean()),
        host=float(host),
        slowest=int(last.argmax()),
        slowest_share=float(last.max() / last.sum()),
        gpu_waits_for_host=statistics.mean(shares) if shares else None,
    )


def verdict(split: StepBreakdown, processes: int, cores: int | None) -> str:
    """The bottlenecks of a run, and the keys that may help. cores: of a host without GPUs, else
    None."""
    share = {
        part: getattr(split, part) / split.step for part in ("data", "exchange", "waiting", "host")
    }
    advice = {
        "data": (
            "data-bound: raise tuning.num_workers, or keep the data on the device"
            " (data.placement=device)"
        ),
        "exchange": (
            "communication-bound: use more samples per process (train.global_batch_size, "
            "train.accumulation_steps), or send fewer bytes (strategy.comm_hook=bf16)"
        ),
        "waiting": _imbalance(split, processes, cores),
        "host": (
            "host-bound: log less often (train.log_every_steps), or find the work between the steps"
        ),
    }
    by_share = sorted(share, key=lambda part: -share[part])
    found = [
        f"{advice[part]} ({100 * share[part]:.0f} % of a step)"
        for part in by_share
        if share[part] > SIGNIFICANT_SHARE
    ]
    if split.gpu_waits_for_host is not None and split.gpu_waits_for_host > 0.5:
        found.append(
            "launch-bound: the GPU waits for kernel launches; try tuning.cuda_graph=true or"
            " tuning.compile=true"
        )
    if not found and sum(share.values()) > SIGNIFICANT_SHARE:
        parts = [f"{part} {100 * share[part]:.0f} %" for part in by_share if share[part] >= 0.01]
        return f"compute-bound; smaller parts: {', '.join(parts)}"
    return "; ".join(found) or "compute-bound: little overhead"


def _imbalance(split: StepBreakdown, processes: int, cores: int | None) -> str:
    if cores is not None and processes > cores:
        return (
            f"imbalanced: {processes} processes share {counted(cores, 'core')} and wait for each"
            " other"
        )
    if split.slowest_share > max(0.6, 1.5 / processes):
        return (
            f"imbalanced: the others wait for rank {split.slowest}; check its GPU, its data and"
            " other processes there"
        )
    return "imbalanced: different ranks are late; check for other work on this machine"


# --- the study ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One number of processes with one global batch."""

    processes: int
    batch: int
    modes: tuple[str, ...]
    """weak, strong, or both if they coincide."""


def study(request: Request) -> tuple[Report, int]:
    """Runs all cells. Returns the report and the exit code. Raises ConfigError before anything
    runs."""
    config: ScalingConfig = bind_settings(ScalingConfig, request.settings)
    machine = this_hardware()
    load = load_at_start()
    cells = _cells(request, config, machine)
    done: dict[Cell, list[Outcome]] = {}
    splits: dict[Cell, Outcome] = {}
    with trial_session(request):
        for repeat in range(config.repeats):
            for cell in cells if repeat % 2 == 0 else reversed(cells):
                outcome = _made(request, _trial(request, config, machine, cell, str(repeat)))
                if outcome:
                    done.setdefault(cell, []).append(outcome)
        for cell in cells:
            outcome = _made(request, _trial(request, config, machine, cell, "split"))
            if outcome:
                splits[cell] = outcome
    code = request.stop.exit_code(UNSAVED) if request.stop.received else 0
    if not any(outcome.completed for found in done.values() for outcome in found):
        code = code or LaunchError.exit_code
    return _report(request, config, cells, done, splits, machine, load), code


def _made(request: Request, trial: Trial) -> Outcome | None:
    name = f"trial {trial.run_dir.parent.name}/{trial.run_dir.name}"
    return run_or_load(
        request,
        trial,
        name,
        lambda outcome: f"{interval_samples_per_second(outcome):,.0f} samples/s",
    )


def _max_processes(config: ScalingConfig, machine: Hardware) -> int:
    if config.processes != "auto":
        return int(config.processes)
    return machine.gpus or machine.cpus


def _trial(
    request: Request, config: ScalingConfig, machine: Hardware, cell: Cell, name: str
) -> Trial:
    """Without GPUs each process has the same number of threads in every run, else one process would
    use all cores."""
    overrides = [
        *request.overrides,
        f"launch.nproc_per_node={cell.processes}",
        f"train.global_batch_size={cell.batch}",
    ]
    overrides += [
        f"train.max_steps={config.steps}",
        f"train.log_every_steps={max(1, config.steps // 10)}",
        *TRAIN_ONLY,
    ]
    if not machine.gpus and not any(key_of(override) == THREADS for override in overrides):
        overrides.append(f"{THREADS}={max(1, machine.cpus // _max_processes(config, machine))}")
    if name == "split":
        overrides += [f"hooks=[{STEP_TIMES}]"]
    return Trial(
        overrides,
        request.run_dir / "trials" / f"{cell.processes}_x_{cell.batch // cell.processes}" / name,
    )


def _cells(request: Request, config: ScalingConfig, machine: Hardware) -> list[Cell]:
    """The runs to make. Raises ConfigError with all problems if one of them cannot run."""
    base = resolve_run(request.program, request.overrides, machine).config
    most = _max_processes(config, machine)
    numbers = [2**power for power in range(most.bit_length()) if 2**power < most] + [most]
    batch = base.train.global_batch_size
    problems = []
    if not base.strategy.has_process_group:
        problems.append(
            f"strategy={base.strategy.name}: runs in one process; study=scaling needs strategy=ddp"
        )
    if batch % most:
        problems.append(
            f"train.global_batch_size={batch}: cannot be split over {most} processes; use "
            f"train.global_batch_size={-(-batch // most) * most}"
        )
    cells: dict[tuple[int, int], list[str]] = {}
    for number in numbers:
        cells.setdefault((number, batch // most * number), []).append("weak")
        cells.setdefault((number, batch), []).append("strong")
    found = [Cell(number, size, tuple(modes)) for (number, size), modes in cells.items()]
    for cell in found if not problems else []:
        for name in ("0", "split"):
            trial = _trial(request, config, machine, cell, name)
            problems += resolve_run(request.program, trial.overrides, machine).problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return found


def _report(
    request: Request,
    config: ScalingConfig,
    cells: Sequence[Cell],
    done: dict[Cell, list[Outcome]],
    splits: dict[Cell, Outcome],
    machine: Hardware,
    load: float,
) -> Report:
    speeds = {
        cell: statistics.median(
            interval_samples_per_second(outcome) for outcome in found if outcome.completed
        )
        for cell, found in done.items()
        if any(outcome.completed for outcome in found)
    }
    on_gpus = any(
        outcome.summary.get("device") == "cuda" for found in done.values() for outcome in found
    )
    cores = None if on_gpus else machine.cpus
    sections: list[Table | Plot] = [
        _efficiency(way, cells, speeds, done) for way in ("weak", "strong")
    ]
    sections += [_splits(cells, splits, cores), _plot(cells, speeds)]
    overrides = _trial(request, config, machine, cells[-1], "split").overrides
    return Report(
        "Scaling",
        f"{config.steps} steps on 1 to {cells[-1].processes} processes. Weak scaling: the same"
        " batch for each process; strong scaling: the same global batch. At 100 % efficiency each"
        " process is as fast as a single one.",
        sections,
        provenance(load),
        [request.command, request.program.command(overrides)],
    )


def _efficiency(
    way: str, cells: Sequence[Cell], speeds: dict[Cell, float], done: dict[Cell, list[Outcome]]
) -> Table:
    rows: list[list[Any]] = []
    single = next(
        (speeds.get(cell) for cell in cells if way in cell.modes and cell.processes == 1), None
    )
    for cell in (cell for cell in cells if way in cell.modes):
        found = speeds.get(cell)
        gain = found / single if found and single else None
        failed = next(
            (outcome.reason for outcome in done.get(cell, []) if not outcome.completed), ""
        )
        percent = 100 * gain / cell.processes if gain else None
        rows.append(
            [cell.processes, cell.batch, cell.batch // cell.processes, found, gain, percent, failed]
        )
    columns = [
        "processes",
        "global batch",
        "batch per process",
        "samples/s",
        "speed-up",
        "efficiency, %",
        "failed",
    ]
    if not any(row[-1] for row in rows):
        columns = columns[:-1]
        rows = [row[:-1] for row in rows]
    return Table(f"{way.capitalize()} scaling", columns, rows)


def _splits(cells: Sequence[Cell], splits: dict[Cell, Outcome], cores: int | None) -> Table:
    rows = []
    for cell in cells:
        outcome = splits.get(cell)
        if outcome and outcome.completed:
            split = read_breakdown(outcome.run_dir)
            parts = (
                split.step,
                split.compute,
                split.exchange,
                split.waiting,
                split.data,
                split.host,
            )
            result = verdict(split, cell.processes, cores)
        else:
            parts = (None,) * 6
            result = outcome.reason if outcome else "not run"
        numbers = [1e3 * part if part is not None else None for part in parts]
        rows.append([cell.processes, cell.batch // cell.processes, *numbers, result])
    columns = ["processes", "batch per process", "step, ms", "compute, ms", "exchange, ms"]
    columns += ["waiting, ms", "data, ms", "host, ms", "verdict"]
    note = (
        f"From separate runs with hooks=[{STEP_TIMES}], without CUDA graphs, whose steps cannot be"
        " split, so they may be slower. Means over ranks and over the middle half of the steps;"
        " the first quarter is left out. compute: forward pass, backward pass and optimizer,"
        " including communication in the forward pass (buffers, batch norm over all processes)."
        " exchange: gradient exchange that does not overlap with the backward pass. waiting: for a"
        " slower rank, before the exchange. host: from the end of a step to the request for the"
        " next batch."
    )
    return Table("Step breakdown", columns, rows, note)


def _plot(cells: Sequence[Cell], speeds: dict[Cell, float]) -> Plot:
    lines = []
    for way in ("weak", "strong"):
        known = [cell for cell in cells if way in cell.modes and cell in speeds]
        if known and known[0].processes == 1:
            values = [100 * speeds[cell] / speeds[known[0]] / cell.processes for cell in known]
            lines.append(Curve(way, [cell.processes for cell in known], values))
    counts = Axis("processes", ticks=sorted({cell.processes for cell in cells}))
    return Plot("Efficiency", curves(lines, counts, Axis("efficiency, %")))
