"""Facts about a sweep before its first trial."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_train.config.folders import has_runs_files, is_of_script
from ddp_train.config.metrics import (
    BY_TEST,
    by_test,
    direction_of,
    objective_name,
)
from ddp_train.config.overrides import Overrides, read_overrides
from ddp_train.config.prepare import read_run
from ddp_train.config.program import Program
from ddp_train.distributed.environment import new_run_id, visible_devices
from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware, detect_hardware
from ddp_train.options.schema import Config
from ddp_train.scored_sets import TEST, VALIDATION, kind_of, of_kind
from ddp_train.sweeps import value_checks
from ddp_train.sweeps.overrides import identifying, is_of_hydra, last_value
from ddp_train.sweeps.pool import POOL, TrialPool, pool_notes, pool_of
from ddp_train.sweeps.preset_words import NO_PARAMS, with_words_of_presets
from ddp_train.sweeps.sweeper import (
    LAUNCHER,
    SWEEPER,
    Direction,
    by_validation,
    direction_for,
    keys_of_params,
    missing_for_slurm,
    notes_on_ranges,
    optuna_problems,
    optuna_trials,
    pruner_of,
    trial_count,
)
from ddp_train.text import shell_word
from ddp_train.text import word as override_of

NO_BASELINE = "sweep.baseline=true has no effect: no two trials run at the same time on this host"


@dataclass(frozen=True)
class SweepPlan:
    """Facts about a sweep before its first trial."""

    sweep_dir: Path
    command: str = ""
    """The command line of the sweep, as a person types it."""
    hydra_arguments: tuple[str, ...] = ()
    """The command line for Hydra."""
    swept: frozenset[str] = frozenset()
    """The keys that the sweep varies."""
    fixed: frozenset[str] = frozenset()
    """The other overrides that distinguish it from another sweep."""
    tied_to_seed: frozenset[str] = frozenset()
    """Keys that another seed changes too: its runs differ in more than their seed."""
    objective: str = ""
    """As typed; its name where `auto` can be resolved before a trial."""
    better: str | None = None
    """max or min; None where only a trial can tell."""
    test_set_rule: str = ""
    """Why the test set should not select; empty if the user was warned, or it is known not to."""
    sweeper: str = ""
    pruner: str = ""
    """The pruner of our own sweeper; empty: it has none."""
    total: int = 0
    """The number of trials in the grid; 0 if a sweeper other than the grid decides it."""
    optuna_trials: int = 0
    """Number of trials that our own sweeper draws."""
    job_launcher: str = ""
    """The Hydra launcher that runs the trials as jobs; empty if they run on this host."""
    pool: TrialPool | None = None
    """Number of trials at a time, each in a process that this one forks; None: one after the
    other, in this process."""
    forks_workers: bool = True
    has_baseline: bool = False
    start: str = ""
    """The name of this start of the sweep."""
    notes: tuple[str, ...] = ()
    """Remarks for the user."""

    def print_notes(self) -> None:
        for note in self.notes:
            print(f"note: {note}", file=sys.stderr)


def checked_arguments(program: Program, argv: list[str]) -> list[str]:
    """The command line for Hydra of a command with flags that starts no run.

    Raises ConfigError with all problems.
    """
    overrides = [word for word in argv if not word.startswith("-") and "=" in word]
    read = read_overrides(program, overrides)
    of_run = [argument for argument in read.arguments if not is_of_hydra(argument)]
    _, problems = read_run(program, read_overrides(program, of_run))
    slurm_problems = missing_for_slurm(last_value(read.arguments, LAUNCHER))
    _raise_if_any([*read.problems, *problems, *slurm_problems])
    return [word for word in argv if word not in overrides] + read.arguments


def plan_sweep(program: Program, argv: list[str]) -> SweepPlan:
    """Check the command line of a sweep before Hydra reads it.

    Raises ConfigError with all problems.
    """
    words = with_words_of_presets(program, [word for word in argv if not word.startswith("-")])
    flags = [word for word in argv if word.startswith("-")]
    read = read_overrides(program, value_checks.last_of_each_key(words.words), sweep=True)
    arguments = read.arguments
    if words.params_are_words:
        arguments.append(NO_PARAMS)
    launcher = last_value(arguments, LAUNCHER)
    job_launcher = ""
    if launcher not in ("", "basic", POOL):
        job_launcher = launcher
    hardware = detect_hardware(visible_devices())
    tried = value_checks.try_values(program, read, hardware, elsewhere=bool(job_launcher))
    config = tried.config
    direction = direction_for(arguments, config, direction_of(config.objective, config))
    problems = [*tried.problems, *missing_for_slurm(job_launcher), *direction.problems]
    _check_sweep(program, read, config, direction, problems)

    swept = frozenset({*read.swept, *keys_of_params(arguments), *words.drawn})
    plan = SweepPlan(
        sweep_dir=Path(config.run_dir or f"runs/{config.name}/sweep_{new_run_id(None)}"),
        command=program.command(argv),
        hydra_arguments=(*flags, *arguments, *direction.overrides),
        swept=swept,
        fixed=identifying(tried.fixed, swept),
        tied_to_seed=tried.tied_to_seed,
        objective=config.objective,
        better=direction.better,
        test_set_rule=by_test(config),
        sweeper=last_value(arguments, SWEEPER),
        pruner=pruner_of(arguments),
        total=trial_count(arguments, read.swept),
        optuna_trials=optuna_trials(arguments),
        job_launcher=job_launcher,
        forks_workers=config.launch.fork_server,
        start=new_run_id(None),
        notes=tuple(notes_on_ranges(arguments)),
    )
    plan = _with_objective(plan, config)
    if not job_launcher:
        plan = _with_pool(plan, tried, hardware, launcher)
    if config.sweep.baseline:
        plan = _with_baseline(plan)
    sweep_dir = override_of("hydra.sweep.dir", plan.sweep_dir)
    return replace(plan, hydra_arguments=(*plan.hydra_arguments, sweep_dir))


def _check_sweep(
    program: Program, read: Overrides, config: Config, direction: Direction, problems: list[str]
) -> None:
    """Raise ConfigError with these problems, and those of the sweep as a whole."""
    problems = [*problems, *optuna_problems(read.arguments, config)]
    if not problems:
        of_hydra = [*read.arguments, *direction.overrides]
        problems = value_checks.hydra_problems(program, of_hydra, read.swept)
    _raise_if_any([*problems, *_folder_of_run(config), *_working_folder()])


def _raise_if_any(problems: list[str]) -> None:
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _folder_of_run(config: Config) -> list[str]:
    """The message for a sweep that is sent into the folder of a run; empty if it is not.

    The run may be a session's, or those of a study.
    """
    if not config.run_dir:
        return []
    folder = Path(config.run_dir)
    is_of_study = any(folder.glob("trials/*/*.json"))
    if not (is_of_study or is_of_script(folder) or has_runs_files(folder)):
        return []
    rule = "is the folder of a run, and a sweep would overwrite the run's report.html; use"
    return [f"run_dir={folder}: {rule} {shell_word('run_dir', f'{folder}_sweep')}"]


def _working_folder() -> list[str]:
    """The message for a working folder that Hydra takes for a reference; empty if it does not.

    Hydra keeps its path in its own config, where `${x}` is the value of a key.
    """
    folder = Path.cwd()
    if "${" not in str(folder):
        return []
    return [
        f"-m: the working folder {folder} has ${{ in its name, which Hydra reads as a reference"
        " to a key; start the sweep in another folder"
    ]


def _with_objective(plan: SweepPlan, config: Config) -> SweepPlan:
    """The plan with the name of its objective, where that is known before a trial has run."""
    sets = config.data.sets()
    if sets is None:
        return plan
    objective = objective_name(config.objective, sets)
    note = test_set_note(objective, sets, plan.test_set_rule)
    if not note:
        return replace(plan, objective=objective)
    return replace(plan, objective=objective, notes=(*plan.notes, note), test_set_rule="")


def _with_pool(
    plan: SweepPlan, tried: value_checks.TriedValues, hardware: Hardware, launcher: str
) -> SweepPlan:
    """The plan with the pool that runs its trials, if one does. launcher: as typed."""
    notes = pool_notes(tried.config, tried.resolved[-1], tried.settings)
    plan = replace(plan, notes=(*plan.notes, *notes))
    pool = pool_of(tried.config, tried.resolved, plan.total, hardware, tried.settings)
    is_needed = pool.at_once > 1 or tried.settings.are_given or plan.optuna_trials > 0
    if launcher == "basic" or (not is_needed and launcher != POOL):
        return plan
    of_pool = pool.overrides([*plan.hydra_arguments])
    return replace(plan, pool=pool, hydra_arguments=(*plan.hydra_arguments, *of_pool))


def _with_baseline(plan: SweepPlan) -> SweepPlan:
    """The plan with the run of `sweep.baseline`, or a note where it would tell nothing."""
    if plan.pool is None or plan.pool.at_once == 1:
        return replace(plan, notes=(*plan.notes, NO_BASELINE))
    return replace(plan, has_baseline=True)


def test_set_note(objective: str, sets: Collection[str], rule: str) -> str:
    """The note for a user who selects by the test set; empty if another set selects.

    sets: the names of those that are scored.
    rule: why it should not; empty: the user knows.
    """
    if not rule or kind_of(objective.partition(".")[0]) != TEST:
        return ""
    if of_kind(VALIDATION, sets):
        rule = f"{BY_TEST}use objective={by_validation(objective, sets)}"
    return f"objective={objective}: {rule}"
