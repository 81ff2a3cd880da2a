"""The report of `study=scaling`: efficiency, the parts of a step, and what limits them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from ddp_lab.study.provenance import provenance
from ddp_lab.study.results import interval_samples_per_second
from ddp_lab.study.step_breakdown import read_breakdown, verdict
from ddp_lab.study.trials import Outcome
from ddp_train.telemetry.pages.charts import Axis, Curve, curves
from ddp_train.telemetry.pages.report import Plot, Report
from ddp_train.telemetry.pages.tables import Table

WEAK_AND_STRONG = ("weak", "strong")


@dataclass(frozen=True)
class Cell:
    """One number of processes with one global batch."""

    processes: int
    batch: int
    modes: tuple[str, ...]
    """weak, strong, or both if they coincide."""

    @property
    def batch_per_process(self) -> int:
        return self.batch // self.processes


@dataclass
class Measurements:
    """The runs of all cells."""

    cells: list[Cell]
    outcomes: dict[Cell, list[Outcome]] = field(default_factory=dict)
    """Runs that are timed as a whole."""
    split_outcomes: dict[Cell, Outcome] = field(default_factory=dict)
    """Runs whose steps are split into parts."""

    def of(self, mode: str) -> list[Cell]:
        """The cells of weak or strong scaling, the fewest processes first."""
        return [cell for cell in self.cells if mode in cell.modes]

    def speed(self, cell: Cell) -> float | None:
        """Median samples per second; None if no run completed."""
        completed = [outcome for outcome in self.outcomes.get(cell, []) if outcome.completed]
        if not completed:
            return None
        return statistics.median(interval_samples_per_second(outcome) for outcome in completed)

    def failure(self, cell: Cell) -> str:
        """Why a run of the cell failed; empty if none did."""
        failed = [outcome for outcome in self.outcomes.get(cell, []) if not outcome.completed]
        return failed[0].reason if failed else ""

    @property
    def any_completed(self) -> bool:
        return any(outcome.completed for outcome in self._all_outcomes())

    @property
    def on_gpus(self) -> bool:
        return any(outcome.summary.get("device") == "cuda" for outcome in self._all_outcomes())

    def _all_outcomes(self) -> list[Outcome]:
        return [outcome for outcomes in self.outcomes.values() for outcome in outcomes]


def build_report(
    measurements: Measurements, cores: int | None, steps: int, load: float, commands: list[str]
) -> Report:
    """The report of the runs made so far.

    cores: number of cores of a host without GPUs, else None.
    steps: optimizer steps of each run.
    load: load average of the machine before the first run.
    """
    sections: list[Table | Plot] = [
        *(efficiency_table(mode, measurements) for mode in WEAK_AND_STRONG),
        _breakdown_table(measurements, cores),
        _plot(measurements),
    ]
    most = measurements.cells[-1].processes
    intro = (
        f"{steps} steps on 1 to {most} processes. Weak scaling: the same batch for each process;"
        " strong scaling: the same global batch. At 100 % efficiency each process is as fast as a"
        " single one."
    )
    return Report("Scaling", intro, sections, provenance(load), commands)


def efficiency_table(mode: str, measurements: Measurements) -> Table:
    """A row for each number of processes. mode: weak or strong."""
    columns = [
        "processes",
        "global batch",
        "batch per process",
        "samples/s",
        "speed-up",
        "efficiency, %",
        "failed",
    ]
    cells = measurements.of(mode)
    single = None
    if cells and cells[0].processes == 1:
        single = measurements.speed(cells[0])
    rows: list[list[Any]] = []
    for cell in cells:
        speed = measurements.speed(cell)
        gain = None
        percent = None
        if speed and single:
            gain = speed / single
            percent = 100 * gain / cell.processes
        measured = [speed, gain, percent, measurements.failure(cell)]
        rows.append([cell.processes, cell.batch, cell.batch_per_process, *measured])
    if not any(measurements.failure(cell) for cell in cells):
        columns.pop()
        rows = [row[:-1] for row in rows]
    return Table(f"{mode.capitalize()} scaling", columns, rows)


def _breakdown_table(measurements: Measurements, cores: int | None) -> Table:
    columns = [
        "processes",
        "batch per process",
        "step, ms",
        "compute, ms",
        "exchange, ms",
        "waiting, ms",
        "data, ms",
        "host, ms",
        "verdict",
    ]
    rows: list[list[Any]] = []
    for cell in measurements.cells:
        outcome = measurements.split_outcomes.get(cell)
        if outcome and outcome.completed:
            breakdown = read_breakdown(outcome.run_dir)
            parts = [
                1e3 * breakdown.step,
                1e3 * breakdown.compute,
                1e3 * breakdown.exchange,
                1e3 * breakdown.waiting,
                1e3 * breakdown.data,
                1e3 * breakdown.host,
                verdict(breakdown, cell.processes, cores),
            ]
        else:
            parts = [*[None] * 6, outcome.reason if outcome else "not run"]
        rows.append([cell.processes, cell.batch_per_process, *parts])
    note = (
        "From separate runs with hooks=[ddp_lab.study.step_times.StepTimes]. These runs use no"
        " CUDA graphs, so they may be slower. Means over ranks and over the middle half of the"
        " steps; the first quarter is left out. compute: forward pass, backward pass and"
        " optimizer, including communication in the forward pass (buffers, batch norm over all"
        " processes). exchange: gradient exchange that does not overlap with the backward pass."
        " waiting: for a slower rank, before the exchange. host: from the end of a step to the"
        " request for the next batch."
    )
    return Table("Step breakdown", columns, rows, note)


def _plot(measurements: Measurements) -> Plot:
    """Efficiency over the number of processes, where one process was measured."""
    lines = []
    for mode in WEAK_AND_STRONG:
        speeds: dict[int, float] = {}
        for cell in measurements.of(mode):
            speed = measurements.speed(cell)
            if speed is not None:
                speeds[cell.processes] = speed
        if 1 in speeds:
            percents = [100 * speed / speeds[1] / count for count, speed in speeds.items()]
            lines.append(Curve(mode, list(speeds), percents))
    ticks = sorted({cell.processes for cell in measurements.cells})
    chart = curves(lines, Axis("processes", ticks=ticks), Axis("efficiency, %"))
    return Plot("Efficiency", chart)
