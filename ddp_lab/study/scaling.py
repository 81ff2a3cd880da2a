"""`study=scaling`: weak and strong scaling over 1, 2, 4 ... processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from ddp_lab.study.provenance import load_at_start
from ddp_lab.study.request import Request, bind_settings, key_of, raise_problems
from ddp_lab.study.results import interval_samples_per_second
from ddp_lab.study.scaling_report import Cell, Measurements, build_report
from ddp_lab.study.trials import TRAIN_ONLY, Outcome, Trial, run_or_load, trial_session
from ddp_train.hardware import Hardware
from ddp_train.options.key import AUTO, key
from ddp_train.telemetry.pages.report import Report

THREADS = "launch.threads_per_process"
STEP_TIMES = "ddp_lab.study.step_times.StepTimes"
SPLIT = "split"
"""Name of the run of a cell whose steps are split into parts; the others are numbered."""


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

    def most_processes(self, hardware: Hardware) -> int:
        if self.processes != "auto":
            return int(self.processes)
        return hardware.gpus or hardware.cpus


def study(request: Request) -> tuple[Report, int]:
    """Run all cells.

    Returns the report and the exit code. Raises ConfigError before anything runs.
    """
    config: ScalingConfig = bind_settings(ScalingConfig, request.settings)
    scaling = Scaling(request, config)
    load = load_at_start()
    cells = scaling.cells()
    measurements = scaling.measure(cells)
    cores = None if measurements.on_gpus else request.hardware.cpus
    command = request.program.command(scaling.trial(cells[-1], SPLIT).overrides)
    report = build_report(measurements, cores, config.steps, load, [request.command, command])
    return report, request.exit_code(measurements.any_completed)


class Scaling:
    """The runs of a study of scaling."""

    def __init__(self, request: Request, config: ScalingConfig) -> None:
        self.request = request
        self.config = config
        self.most_processes = config.most_processes(request.hardware)

    def cells(self) -> list[Cell]:
        """The cells to measure. Raises ConfigError with all problems if one of them cannot run."""
        base = self.request.resolve(self.request.overrides).config
        batch = base.train.global_batch_size
        most = self.most_processes
        problems = []
        if not base.strategy.has_process_group:
            problems.append(
                f"strategy={base.strategy.name}: this strategy runs in one process; study=scaling"
                " needs strategy=ddp"
            )
        if batch % most:
            divisible = -(-batch // most) * most
            problems.append(
                f"train.global_batch_size={batch}: cannot be split over {most} processes; use"
                f" train.global_batch_size={divisible}"
            )
        raise_problems(problems)
        cells = _cells(most, batch)
        for cell in cells:
            for name in ("0", SPLIT):
                problems += self.request.resolve(self.trial(cell, name).overrides).problems
        raise_problems(problems)
        return cells

    def trial(self, cell: Cell, name: str) -> Trial:
        """One run of a cell. name: its number, or SPLIT."""
        overrides = [
            *self.request.overrides,
            f"launch.nproc_per_node={cell.processes}",
            f"train.global_batch_size={cell.batch}",
            f"train.max_steps={self.config.steps}",
            f"train.log_every_steps={max(1, self.config.steps // 10)}",
            *TRAIN_ONLY,
        ]
        if not self.request.hardware.gpus and not any(
            key_of(given) == THREADS for given in overrides
        ):
            # as many threads in every run, else one process would use all cores
            threads = max(1, self.request.hardware.cpus // self.most_processes)
            overrides.append(f"{THREADS}={threads}")
        if name == SPLIT:
            overrides.append(f"hooks=[{STEP_TIMES}]")
        folder = f"{cell.processes}_x_{cell.batch_per_process}"
        return Trial(overrides, self.request.run_dir / "trials" / folder / name)

    def measure(self, cells: list[Cell]) -> Measurements:
        """Run all trials, in rounds of alternating order; at last those whose steps are split."""
        measurements = Measurements(cells)
        with trial_session(self.request):
            for repeat in range(self.config.repeats):
                ordered = cells if repeat % 2 == 0 else cells[::-1]
                for cell in ordered:
                    outcome = self._outcome(self.trial(cell, str(repeat)))
                    if outcome:
                        measurements.outcomes.setdefault(cell, []).append(outcome)
            for cell in cells:
                outcome = self._outcome(self.trial(cell, SPLIT))
                if outcome:
                    measurements.split_outcomes[cell] = outcome
        return measurements

    def _outcome(self, trial: Trial) -> Outcome | None:
        return run_or_load(
            self.request,
            trial,
            f"trial {trial.run_dir.parent.name}/{trial.run_dir.name}",
            lambda outcome: f"{interval_samples_per_second(outcome):,.0f} samples/s",
        )


def _cells(most: int, batch: int) -> list[Cell]:
    """Powers of two up to `most` processes, each with its batches for weak and strong scaling."""
    powers = [2**power for power in range(most.bit_length())]
    counts = [power for power in powers if power < most] + [most]
    modes: dict[tuple[int, int], list[str]] = {}
    for count in counts:
        weak_batch = batch // most * count
        modes.setdefault((count, weak_batch), []).append("weak")
        modes.setdefault((count, batch), []).append("strong")
    return [Cell(count, size, tuple(names)) for (count, size), names in modes.items()]
