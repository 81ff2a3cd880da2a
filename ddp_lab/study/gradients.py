"""`study=gradients`: compares the gradients of N processes with those of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from ddp_lab.study.gradients_report import Comparison, GradientsReport
from ddp_lab.study.request import Request, bind_settings, key_of, raise_problems
from ddp_lab.study.trials import Outcome, Trial, run_or_load, trial_session
from ddp_train.hardware import Hardware
from ddp_train.options.key import AUTO, key
from ddp_train.options.schema import Config
from ddp_train.telemetry.pages.report import Report
from ddp_train.text import counted

GRADIENT_PROBE = "ddp_lab.study.gradient_probe.GradientProbe"
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "tf32": 1e-2, "fp16": 5e-2, "bf16": 1e-1}
"""Largest relative difference attributed to rounding when sums have another order.

A dozen times the precision of 16-bit numbers, thousands of times that of others. fp64 is decisive:
a missing exchange, or samples that are counted twice, change gradients by 1 / (number of processes)
or more.
"""
DEFAULT_PROCESSES = 3
"""Number of processes without GPUs."""

TrialKey = tuple[str, int]
"""Precision, and number of processes."""


@dataclass
class GradientsConfig:
    """conf/study/gradients.yaml."""

    kind: str = key("gradients", "the kind of study", choices=("gradients",))
    processes: Union[int, str] = key(
        "auto",
        "number of processes to compare with one; auto: one per GPU, or 3 without GPUs",
        at_least=2,
        **AUTO,
    )

    def process_count(self, hardware: Hardware) -> int:
        if self.processes == "auto":
            return hardware.gpus or DEFAULT_PROCESSES
        return int(self.processes)


def study(request: Request) -> tuple[Report, int]:
    """Run the comparisons.

    Returns the report and the exit code. Raises ConfigError before anything runs.
    """
    config: GradientsConfig = bind_settings(GradientsConfig, request.settings)
    processes = config.process_count(request.hardware)
    base = _base_config(request, processes)
    precisions = list(dict.fromkeys(["fp64", str(base.tuning.precision)]))
    trials = {
        (precision, count): _trial(request, base, precision, count)
        for precision in precisions
        for count in (1, processes)
    }
    problems = []
    for trial in trials.values():
        problems += request.resolve(trial.overrides).problems
    raise_problems(problems)
    outcomes = _run(request, trials)
    report = GradientsReport(request, base, processes)
    for precision in precisions:
        tolerance = _tolerance(base, precision)
        one = outcomes[precision, 1]
        many = outcomes[precision, processes]
        report.add(Comparison(precision, tolerance, one, many))
    return report.build(), request.exit_code(report.all_agree)


def _base_config(request: Request, processes: int) -> Config:
    """The config of the command on several processes. Raises ConfigError."""
    run = request.resolve([*request.overrides, f"launch.nproc_per_node={processes}"])
    problems = run.problems
    strategy = run.config.strategy
    if not strategy.has_process_group:
        problems.append(
            f"strategy={strategy.name}: this strategy runs in one process; study=gradients needs"
            " strategy=ddp"
        )
    raise_problems(problems)
    return run.config


def _run(request: Request, trials: dict[TrialKey, Trial]) -> dict[TrialKey, Outcome | None]:
    """The outcomes of the trials; None for those after a stop."""
    outcomes = {}
    with trial_session(request):
        for (precision, count), trial in trials.items():
            outcomes[precision, count] = run_or_load(
                request,
                trial,
                f"{precision}, {counted(count, 'process')}",
                lambda outcome: f"took {outcome.seconds:.0f} s",
            )
    return outcomes


def _trial(request: Request, base: Config, precision: str, processes: int) -> Trial:
    """One step on one sample less than a global batch: micro-batches have different sizes."""
    is_alone = processes == 1
    replaced = ["schedule"]
    if is_alone:
        replaced += ["strategy", "train.accumulation_steps"]
    overrides = [override for override in request.overrides if not _is_of(override, replaced)]
    overrides += [
        f"hooks=[{GRADIENT_PROBE}]",
        "train.max_steps=1",
        "schedule=constant",
        f"launch.nproc_per_node={processes}",
    ]
    if is_alone:
        overrides.append("strategy=single")
    if hasattr(base.data, "limit") and base.data.limit is None:
        overrides.append(f"data.limit={max(base.train.global_batch_size - 1, 1)}")
    if precision == "fp64":
        overrides.append("tuning.precision=fp64")
        if not is_alone and base.strategy.comm_hook != "none":
            overrides.append("strategy.comm_hook=none")
    return Trial(overrides, request.run_dir / "trials" / precision / f"{processes}_processes")


def _is_of(override: str, keys: Sequence[str]) -> bool:
    """Tell whether an override sets one of the keys, or a key below it."""
    name = key_of(override)
    return any(name == key or name.startswith(f"{key}.") for key in keys)


def _tolerance(base: Config, precision: str) -> float:
    """The tolerance of the precision, or of a gradient exchange that is less precise."""
    if precision == "fp64":
        return TOLERANCES[precision]
    used = precision
    if precision == "fp32" and base.tuning.tf32 and base.device == "cuda":
        used = "tf32"
    exchanged = getattr(base.strategy, "comm_hook", "none")
    return max(TOLERANCES[used], TOLERANCES.get(exchanged, 0.0))
