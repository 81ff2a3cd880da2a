"""Sweepers and launchers of Hydra: what they need, and what they must be given. Torch-free."""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import RangeSweep

from ddp_train.config.metrics import MEASURED
from ddp_train.config.packages import how_to_install_extra
from ddp_train.options.schema import Config
from ddp_train.scored_sets import TEST, VALIDATION, kind_of, main_set, of_kind
from ddp_train.sweeps.overrides import is_of_hydra, key_of, last_value, parsed

LAUNCHER = "hydra/launcher"
SWEEPER = "hydra/sweeper"
SLURM = ("slurm", "submitit_slurm")
OPTUNA = "pool_optuna"
"""Our own sweeper."""
OPTUNA_TRIALS = 20
"""Number of trials by default."""
KNOWN_SWEEPERS = ("", "basic", OPTUNA)
"""Sweepers whose parameters are checked before the first trial; empty: the grid."""
OPTIMIZERS = ("optuna", OPTUNA)
"""Sweepers that must be given the better direction."""
DIRECTION = "hydra.sweeper.direction"
DIRECTIONS = {"max": "maximize", "min": "minimize"}
"""The value of DIRECTION, by the better direction."""
BETTER_WHEN = {"max": "the higher it is", "min": "the lower it is"}
"""The better direction in words, after "is better"."""
PARAMS = "hydra.sweeper.params."


@dataclass(frozen=True)
class Direction:
    """The better direction of the objective, and what an optimizing sweeper is given of it."""

    better: str | None
    """max or min; None: only a trial can tell."""
    overrides: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def missing_for_slurm(launcher: str) -> list[str]:
    """Problems of a host that cannot submit jobs to SLURM."""
    if launcher not in SLURM:
        return []
    # the parent first: a search below a package that is missing raises
    is_installed = importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec(
        "hydra_plugins.hydra_submitit_launcher"
    )
    if not is_installed:
        return [
            f"{LAUNCHER}={launcher}: needs the package hydra-submitit-launcher;"
            f" {how_to_install_extra('slurm')}"
        ]
    if not shutil.which("srun"):
        return [
            f"{LAUNCHER}={launcher}: there is no srun on this host; start the sweep where `sbatch`"
            " works"
        ]
    return []


def trial_count(arguments: list[str], swept: Mapping[str, Sequence[str]]) -> int:
    """The number of trials; 0 if a sweeper other than the grid and our own decides it."""
    if optuna_trials(arguments):
        return optuna_trials(arguments)
    if last_value(arguments, SWEEPER) not in ("", "basic") or keys_of_params(arguments):
        return 0
    return math.prod(len(values) for values in swept.values())


def optuna_trials(arguments: list[str]) -> int:
    """The number of trials that our own sweeper draws; 0: another one draws."""
    if last_value(arguments, SWEEPER) != OPTUNA:
        return 0
    count = last_value(arguments, "hydra.sweeper.n_trials")
    return int(count) if count.isdigit() else OPTUNA_TRIALS


def keys_of_params(arguments: list[str]) -> set[str]:
    """Keys that are drawn because they are parameters of the sweeper."""
    keys = [key_of(argument) for argument in arguments]
    return {key.removeprefix(PARAMS).lstrip("+") for key in keys if key.startswith(PARAMS)}


def pruner_of(arguments: list[str]) -> str:
    """The pruner of our own sweeper; empty: no trial is ended before its time."""
    if last_value(arguments, SWEEPER) != OPTUNA:
        return ""
    pruner = last_value(arguments, f"{SWEEPER}/pruner")
    return "" if pruner == "none" else pruner


def is_drawn() -> bool:
    """Whether a sweeper other than the grid chooses the trials of the sweep that Hydra runs."""
    sweeper = HydraConfig.get().sweeper
    return not sweeper._target_.endswith(".BasicSweeper") or bool(sweeper.get("params"))


def optuna_problems(arguments: list[str], config: Config) -> list[str]:
    """Settings that contradict our own sweeper, if it is used."""
    if last_value(arguments, SWEEPER) != OPTUNA:
        return []
    problems = []
    launcher = last_value(arguments, LAUNCHER)
    if launcher not in ("", "pool"):
        rule = "needs hydra/launcher=pool, which says when a trial has ended"
        problems.append(f"{SWEEPER}={OPTUNA}: {rule}; leave out {LAUNCHER}={launcher}")
    sets = config.data.sets() or [*config.data.named_sets()]
    return problems + pruner_problems(pruner_of(arguments), config.objective, sets)


def pruner_problems(pruner: str, objective: str, sets: Collection[str]) -> list[str]:
    """Why a pruner would see no value of an objective while trials run.

    pruner: empty: there is none.
    sets: the names of those that are scored, as far as they are known.
    """
    if pruner and objective in MEASURED:
        return [
            f"{SWEEPER}/pruner={pruner}: objective={objective} is known only at the end of a"
            f" trial, so no trial can be pruned; leave out {SWEEPER}/pruner={pruner}"
        ]
    by_test = kind_of(objective.partition(".")[0]) == TEST
    if pruner and by_test and of_kind(VALIDATION, sets):
        rule = f"with a validation set objective={objective} is known only at the end of a trial"
        return [
            f"{SWEEPER}/pruner={pruner}: {rule}; use objective={by_validation(objective, sets)}"
        ]
    return []


def notes_on_ranges(arguments: list[str]) -> Iterator[str]:
    """Notes on ranges that our own sweeper draws from: hydra-optuna-sweeper would draw the end."""
    if last_value(arguments, SWEEPER) != OPTUNA:
        return
    for argument in arguments:
        if "range(" not in argument or is_of_hydra(argument):
            continue
        value = parsed(argument).value()
        if isinstance(value, RangeSweep):
            numbers = [*value.range()]
            drawn = f"draws {numbers[0]} to {numbers[-1]}"
            rule = "a range excludes its end, as in a grid; an interval includes its end"
            yield f"{argument.lstrip('+')} {drawn}: {rule}"


def by_validation(objective: str, sets: Collection[str]) -> str:
    """The same metric on the first validation set."""
    return f"{main_set(sets)}.{objective.partition('.')[2]}"


def direction_for(arguments: list[str], config: Config, better: str | None) -> Direction:
    """The direction, and what is wrong with the one on the command line.

    better: max or min; None: only the task knows.
    """
    sweeper = last_value(arguments, SWEEPER)
    if sweeper not in OPTIMIZERS:
        return Direction(better)
    given = last_value(arguments, DIRECTION)
    if better is None:
        return _direction_of_user(sweeper, given, config.objective)
    if not given:
        return Direction(better, [f"{DIRECTION}={DIRECTIONS[better]}"])
    if given.lower() != DIRECTIONS[better]:
        rule = f"objective={config.objective} is better {BETTER_WHEN[better]}"
        remedy = f"use {DIRECTION}={DIRECTIONS[better]}"
        return Direction(better, problems=[f"{DIRECTION}={given}: {rule}; {remedy}"])
    return Direction(better)


def _direction_of_user(sweeper: str, given: str, objective: str) -> Direction:
    """The direction where only the task knows it, so that the user must give it."""
    if not given:
        rule = f"the task does not say whether a high or a low objective={objective} is better"
        choices = " or ".join(f"{DIRECTION}={direction}" for direction in DIRECTIONS.values())
        return Direction(None, problems=[f"{SWEEPER}={sweeper}: {rule}; add {choices}"])
    for better, direction in DIRECTIONS.items():
        if direction == given.lower():
            return Direction(better)
    choices = ", ".join(DIRECTIONS.values())
    return Direction(None, problems=[f"{DIRECTION}={given}: must be one of {choices}"])


def direction_problems(sweeper: str, objective: str, given: str | None, better: str) -> list[str]:
    """The message for a sweeper that was given the worse direction; empty if it was not.

    given: max or min; None: the sweeper was given none.
    better: max or min, as a trial has reported it.
    """
    if sweeper not in OPTIMIZERS or given is None or given == better:
        return []
    rule = f"objective={objective} is better {BETTER_WHEN[better]} with this task"
    return [f"{DIRECTION}={DIRECTIONS[given]}: {rule}; use {DIRECTION}={DIRECTIONS[better]}"]
