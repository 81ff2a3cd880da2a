"""`mode=study`: the runs of a study, one after the other, and its report. Does not import torch."""

from __future__ import annotations

import importlib
from typing import Protocol

from ddp_lab.study import variants_report
from ddp_lab.study.provenance import load_at_start
from ddp_lab.study.request import Request, read_request
from ddp_lab.study.trials import trial_session
from ddp_lab.study.variant_trials import VariantTrials
from ddp_lab.study.variants import plan
from ddp_train.config.program import Program
from ddp_train.config.run_directory import unwritten
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.telemetry.pages.page import write
from ddp_train.telemetry.pages.report import Report, show
from ddp_train.telemetry.pages.tables import folding_console


class Kind(Protocol):
    """The interface of a module for one kind of study.

    `kind: NAME` in conf/study/*.yaml is ddp_lab/study/NAME.py.
    """

    def study(self, request: Request) -> tuple[Report, int]:
        """Run the study, and return its report and exit code.

        Locks the run directory (`trials.trial_session`, `lock_run_dir`). Raises ConfigError before
        anything runs.
        """
        ...


def study(program: Program, overrides: list[str], world: World | None) -> int:
    """Run the study that the overrides name, write and print its report.

    With `--help` it only prints the keys of the study.

    world: the processes that torchrun has started; None without torchrun.

    Returns the exit code. Raises ConfigError before anything runs, for a mistake in the overrides
    or under torchrun; and after the run, if the report cannot be written.
    """
    if world:
        problem = (
            f"mode=study: a study starts its own processes; run it with {program.typed}, not"
            " torchrun"
        )
        raise ConfigError([problem])
    if "-h" in overrides or "--help" in overrides:
        print(help_text(program, overrides))
        return 0
    request = read_request(program, overrides)
    kind = str(request.settings.get("kind", "variants"))
    if kind == "variants":
        run_study = study_variants
    else:
        run_study = importlib.import_module(f"ddp_lab.study.{kind}").study
    with request.resources:
        report, code = run_study(request)
        try:
            page = write(report, request.run_dir)
        except OSError as error:
            raise unwritten(request.run_dir, error) from None
    show(report, folding_console())
    print(f"report {page}")
    return code


def help_text(program: Program, overrides: list[str]) -> str:
    """The commented file of the study that is named; without a name, one line for each study."""
    lines = []
    for path in program.files("study"):
        name = path.stem
        text = path.read_text().strip().replace("python launch.py", program.typed)
        if f"study={name}" in overrides:
            heading = f"{program.shown(path)}; change a KEY of it with study.KEY=VALUE"
            return f"{heading}\n\n{text}"
        summary = text.splitlines()[0].lstrip("# ")
        lines.append(f"study={name:<12} {summary}")
    return "\n".join([*lines, "", "mode=study study=NAME --help shows the keys of one study."])


def study_variants(request: Request) -> tuple[Report, int]:
    """A study of named variants."""
    planned = plan(request)
    load = load_at_start()
    with trial_session(request):
        trials = VariantTrials(request, planned)
        trials.run()
    report = variants_report.build_report(request, planned, trials.outcomes, load)
    return report, request.exit_code(trials.is_comparison)
