"""`mode=study`: the runs of a study, one after the other, and its report. Does not import torch."""

from __future__ import annotations

import importlib
from typing import Protocol

from rich.console import Console

from ddp_lab.study import variants_report
from ddp_lab.study.provenance import load_at_start
from ddp_lab.study.request import Request, read_request
from ddp_lab.study.results import METRICS, median
from ddp_lab.study.trials import Trial, completed_outcome, run, trial_session
from ddp_lab.study.variants import Study, Variant, merged, plan, trials_folder
from ddp_train.config.program import Program
from ddp_train.config.run_directory import unwritten
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, LaunchError
from ddp_train.resilience.preemption import UNSAVED
from ddp_train.telemetry.pages.page import write
from ddp_train.telemetry.pages.report import Report, show


class Kind(Protocol):
    """The interface of a module for one kind of study: `kind: NAME` in conf/study/*.yaml is
    ddp_lab/study/NAME.py."""

    def study(self, request: Request) -> tuple[Report, int]:
        """Returns the report and the exit code. Locks the run directory (`trials.trial_session`,
        `lock_run_dir`).

        Raises ConfigError before anything runs.
        """
        ...


def study(program: Program, overrides: list[str], world: World | None) -> int:
    """Runs the study that the overrides name, writes and prints its report. Returns the exit code.

    Raises ConfigError before anything runs.
    """
    if world:
        raise ConfigError(
            [
                f"mode=study: a study starts its own processes; run it with {program.typed}, not"
                " torchrun"
            ]
        )
    if {"-h", "--help"} & set(overrides):
        print(help_text(program, overrides))
        return 0
    request = read_request(program, overrides)
    kind = str(request.settings.get("kind", "variants"))
    if kind == "variants":
        make = _study_variants
    else:
        make = importlib.import_module(f"ddp_lab.study.{kind}").study
    with request.resources:
        report, code = make(request)
        try:
            page = write(report, request.run_dir)
        except OSError as error:
            raise unwritten(request.run_dir, error) from None
    show(report, Console(highlight=False))
    print(f"report {page}")
    return code


def help_text(program: Program, overrides: list[str]) -> str:
    """The commented file of the study that is named; without a name, one line for each study."""
    files = {
        path.stem: (
            program.shown(path),
            path.read_text().strip().replace("python launch.py", program.typed),
        )
        for path in program.files("study")
    }
    for name, (file, text) in files.items():
        if f"study={name}" in overrides:
            return f"{file}; change a KEY of it with study.KEY=VALUE\n\n{text}"
    lines = [
        f"study={name:<12} {text.splitlines()[0].lstrip('# ')}" for name, (_, text) in files.items()
    ]
    return "\n".join([*lines, "", "mode=study study=NAME --help shows the keys of one study."])


def _study_variants(request: Request) -> tuple[Report, int]:
    """A study of named variants: runs every trial that is not completed yet."""
    planned = plan(request)
    load = load_at_start()
    outcomes: variants_report.Outcomes = {}
    with trial_session(request):
        _run_all(request, planned, outcomes)
    code = 0 if _has_comparison(planned, outcomes) else LaunchError.exit_code
    code = request.stop.exit_code(UNSAVED) if request.stop.received else code
    return variants_report.build_report(request, planned, outcomes, load), code


def trial_of(request: Request, planned: Study, variant: Variant, repeat: int) -> Trial:
    """One run of a variant."""
    seed = [f"seed={planned.first.seed + repeat}"] if planned.config.vary_seed else []
    return Trial(
        merged(variant.overrides, seed), trials_folder(request.run_dir, variant) / str(repeat)
    )


def _run_all(request: Request, planned: Study, outcomes: variants_report.Outcomes) -> None:
    """Runs the trials in rounds of alternating order. Keeps completed ones; does not repeat a
    variant that failed."""
    runnable = [variant for variant in planned.variants if not variant.reason]
    console = Console(highlight=False)
    metric = METRICS[planned.config.metric]
    kept = {
        (variant.name, repeat): completed_outcome(trial_of(request, planned, variant, repeat))
        for variant in runnable
        for repeat in range(planned.config.repeats)
    }  # all of them first: trials with other settings are an error before anything runs
    number = 0
    total = len(runnable) * planned.config.repeats
    for repeat in range(planned.config.repeats):
        for variant in runnable if repeat % 2 == 0 else reversed(runnable):
            number += 1
            found = outcomes.setdefault(variant.name, [])
            if any(not outcome.completed for outcome in found):
                continue
            name = f"trial {number}/{total}  {variant.name}, repeat {repeat + 1}"
            console.print(name, end="  ", markup=False, soft_wrap=True)
            before = kept[variant.name, repeat]
            outcome = before or run(
                trial_of(request, planned, variant, repeat), request.program, request.stop
            )
            if outcome is None:
                console.print(
                    f"stopped; continue with {request.command}", markup=False, soft_wrap=True
                )
                return
            found.append(outcome)
            value = median(metric.values([outcome]))
            result = outcome.reason or (
                f"{value:,.4g} {metric.label}" if value is not None else "completed"
            )
            took = "from an earlier run" if outcome is before else f"took {outcome.seconds:.0f} s"
            console.print(f"{result}  ({took})", markup=False, soft_wrap=True)


def _has_comparison(planned: Study, outcomes: variants_report.Outcomes) -> bool:
    """Whether the baseline has a result, and another variant if there is one."""
    done = {name for name, found in outcomes.items() if any(outcome.completed for outcome in found)}
    return planned.baseline in done and len(done) >= min(2, len(planned.variants))
