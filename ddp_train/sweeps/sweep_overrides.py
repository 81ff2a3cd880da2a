"""The words of a sweep that are about its trials together: which sweeper draws them, and what that
must be told."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from ddp_train.config.metrics import MEASURED, has_validation
from ddp_train.options.schema import Config
from ddp_train.text import word

LAUNCHER = "hydra/launcher"
SWEEPER = "hydra/sweeper"
SLURM = ("slurm", "submitit_slurm")
OPTUNA = "pool_optuna"
TRIALS = 20
"""Our own sweeper, and how many trials it has if nobody says."""
PLUGINS = {"optuna": "hydra-optuna-sweeper"}
DIRECTION_KEYS = {
    "optuna": ("hydra.sweeper.direction", {"max": "maximize", "min": "minimize"}),
    OPTUNA: ("hydra.sweeper.direction", {"max": "maximize", "min": "minimize"}),
    "nevergrad": ("hydra.sweeper.optim.maximize", {"max": "true", "min": "false"}),
    "ax": ("hydra.sweeper.ax_config.experiment.minimize", {"max": "false", "min": "true"}),
}
"""Sweepers that optimize: the key that tells each of them the better direction, and its values."""
NO_BASELINE = "sweep.baseline=true has no effect: the trials share no host, or run one at a time"
HIGHER = {"max": "the higher it is", "min": "the lower it is"}


def key(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def last(arguments: list[str], name: str) -> str:
    """The value that a key was given last; "" if it was not."""
    return next((word.partition("=")[2] for word in reversed(arguments) if key(word) == name), "")


def compared(words: Iterable[str], swept: set[str]) -> set[str]:
    """What tells one study from another: the words that are not swept, as Hydra writes them. How
    the trials run is none of it."""
    read = [OverridesParser.create().parse_override(word) for word in words_of_trial(words)]
    return {
        f"{key(word.get_key_element())}={word.get_value_element_as_str()}"
        for word in read
        if key(word.get_key_element()) not in swept
        and not key(word.get_key_element()).startswith("launch.")
    }


def words_of_trial(overrides: Any) -> list[str]:
    """Those that a run of its own would have: the keys of `sweep` are about several."""
    return [
        str(word)
        for word in overrides
        if not key(str(word)).startswith(("sweep.", "hydra.", "hydra/", "run_dir"))
    ]


def in_folder(path: Path) -> str:
    """Where Hydra puts the trials, each in a folder of its number."""
    return word("hydra.sweep.dir", path)


def total_of(arguments: list[str], swept: dict[str, list[str]]) -> int:
    """The number of trials; 0 if a sweeper other than the grid and our own decides it."""
    is_grid = last(arguments, SWEEPER) in ("", "basic") and not params(arguments)
    return drawn_by_optuna(arguments) or (math.prod(map(len, swept.values())) if is_grid else 0)


@contextlib.contextmanager
def hydra_set_aside() -> Iterator[None]:
    """Allows a config to be composed while Hydra runs a trial: Hydra has one global instance."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer


def missing_for_slurm(name: str) -> list[str]:
    """What this host lacks to submit jobs to SLURM."""
    if not has_plugin("hydra-submitit-launcher"):
        return [
            f"{LAUNCHER}={name}: needs the package hydra-submitit-launcher; pip install -e"
            " '.[slurm]'"
        ]
    if not shutil.which("srun"):
        return [
            f"{LAUNCHER}={name}: there is no srun on this host; start the sweep where `sbatch`"
            " works"
        ]
    return []


def has_plugin(package: str) -> bool:
    """Whether a plugin of Hydra is installed."""
    parent = importlib.util.find_spec(
        "hydra_plugins"
    )  # find_spec of a submodule raises if the parent is missing
    return bool(parent and importlib.util.find_spec(f"hydra_plugins.{package.replace('-', '_')}"))


def unusable_sweeper(sweeper: str) -> list[str]:
    """What is missing for a sweeper that optimizes."""
    if sweeper == OPTUNA and not importlib.util.find_spec("optuna"):
        return [f"{SWEEPER}={sweeper}: needs the package optuna; pip install -e '.[optuna]'"]
    if sweeper in PLUGINS and not has_plugin(PLUGINS[sweeper]):
        own = (
            f"install it, or use {SWEEPER}={OPTUNA}, which waits for no batch (pip install -e"
            " '.[optuna]')"
        )
        return [f"{SWEEPER}={sweeper}: needs the package {PLUGINS[sweeper]}; {own}"]
    return []


def drawn_by_optuna(arguments: list[str]) -> int:
    """How many trials our own sweeper draws; 0: another one does."""
    given = last(arguments, "hydra.sweeper.n_trials")
    if last(arguments, SWEEPER) == OPTUNA:
        return int(given) if given.isdigit() else TRIALS
    return 0


def params(arguments: list[str]) -> set[str]:
    """Keys whose values a sweeper draws that are given as its parameters, not by name."""
    before = "hydra.sweeper.params."
    return {
        key(word).removeprefix(before).lstrip("+")
        for word in arguments
        if key(word).startswith(before)
    }


def pruner_of(arguments: list[str]) -> str:
    """That of our own sweeper; "": no trial is ended before its time."""
    if last(arguments, SWEEPER) == OPTUNA:
        pruner = last(arguments, f"{SWEEPER}/pruner")
    else:
        pruner = ""
    return "" if pruner == "none" else pruner


def unpruned(pruner: str, objective: str, validates: bool) -> list[str]:
    """Why a pruner would see nothing of an objective while trials run."""
    if pruner and objective in MEASURED:
        return [
            f"{SWEEPER}/pruner={pruner}: objective={objective} is known at the end only; leave one"
            " of them out"
        ]
    if pruner and validates and objective.startswith("test."):
        rule = f"with a validation set objective={objective} is known at the end only"
        return [f"{SWEEPER}/pruner={pruner}: {rule}; use objective={by_validation(objective)}"]
    return []


def by_validation(objective: str) -> str:
    return f"validation.{objective.partition('.')[2]}"


def unusable_with_optuna(arguments: list[str], config: Config) -> list[str]:
    """What contradicts our own sweeper."""
    if last(arguments, SWEEPER) != OPTUNA:
        return []
    launcher = last(arguments, LAUNCHER)
    found = []
    if launcher not in ("", "pool"):
        rule = "needs hydra/launcher=pool, which says when a trial has ended"
        found.append(f"{SWEEPER}={OPTUNA}: {rule}; leave out {LAUNCHER}={launcher}")
    return found + unpruned(pruner_of(arguments), config.objective, bool(has_validation(config)))


def told_direction(
    sweeper: str, arguments: list[str], config: Config, better: str | None
) -> tuple[list[str], list[str], str | None]:
    """What a sweeper that optimizes must be told about the better direction, what is wrong with
    what it was told, and the direction. better: max or min; None: only the task knows."""
    name, words = DIRECTION_KEYS[sweeper]
    given = last(arguments, name)
    if better is None and not given:
        rule = f"only the task knows which direction of objective={config.objective} is better"
        return (
            [],
            [f"{SWEEPER}={sweeper}: {rule}; add {name}={words['max']} or {name}={words['min']}"],
            None,
        )
    if better is None:
        better = next((one for one, word in words.items() if word == given.lower()), None)
        return (
            [],
            [] if better else [f"{name}={given}: must be one of {', '.join(words.values())}"],
            better,
        )
    if given and given.lower() != words[better]:
        rule = f"objective={config.objective} is better {HIGHER[better]}"
        return [], [f"{name}={given}: {rule}; leave it out, or use {name}={words[better]}"], better
    return [] if given else [f"{name}={words[better]}"], [], better


def contradiction(sweeper: str, objective: str, told: str | None, better: str) -> list[str]:
    """What is wrong with the direction that a sweeper was told, once a trial has said the better
    one."""
    if told in (None, better) or not sweeper:
        return []
    name, words = DIRECTION_KEYS[sweeper]
    rule = f"objective={objective} is better {HIGHER[better]} with this task"
    return [f"{name}={words[str(told)]}: {rule}; use {name}={words[better]}"]
