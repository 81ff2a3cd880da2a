"""Keys of Hydra that would move a run, or the trials of a sweep, out of their folders.

Hydra reads them from the command line and from the `hydra` section of a preset. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ddp_train.options.problem import Problem
from ddp_train.text import shown


@dataclass(frozen=True)
class FixedKey:
    """A key of Hydra that has one value here."""

    key: str
    values: tuple[Any, ...]
    """The values that are allowed."""
    rule: str
    remedy: str
    """A `{}` stands for the value that was given."""
    acts_on_runs: bool = True
    """Whether a preset with it is wrong for a run without -m too."""

    def problem(self, value: Any) -> Problem:
        """The problem of a value."""
        folder = value
        if isinstance(value, list) and len(value) == 1:
            folder = str(value[0]).removeprefix("file://")
        if not re.fullmatch(r"[\w./-]+", str(folder)):
            folder = "FOLDER"
        remedy = self.remedy.replace("{}", str(folder))
        return Problem(f"{self.key}={shown(value)}", self.rule, remedy)


ONE_FOLDER = "a run stays in the folder where it was started, and writes only to run_dir"
FIXED = {
    fixed.key: fixed
    for fixed in (
        FixedKey("hydra.run.dir", (".",), "run_dir is the folder of a run", "use run_dir={}"),
        FixedKey(
            "hydra.sweep.dir",
            (".",),
            "run_dir is the folder of a sweep",
            "use run_dir={}",
            acts_on_runs=False,
        ),
        FixedKey(
            "hydra.sweep.subdir",
            ("${hydra.job.num}",),
            "the folder of a trial is named by its number, the only name that no two trials share",
            "leave it out; trials.jsonl has the overrides of each number",
            acts_on_runs=False,
        ),
        FixedKey("hydra.job.chdir", (False, None), ONE_FOLDER, "leave it out"),
        FixedKey(
            "hydra.output_subdir",
            (None, ".hydra"),
            "a run writes its config to config.yaml in run_dir",
            "leave it out",
        ),
    )
}
"""By their names."""
SEARCH_PATH = FixedKey(
    "hydra.searchpath", ([],), "your presets must be in one folder", "use --config-dir={}"
)
"""Hydra refuses it in a preset itself."""


def problem_of_word(key: str, value: Any) -> Problem | None:
    """The problem of a key of Hydra on a command line; None if it may be given in a sweep."""
    if isinstance(value, dict):
        for name, item in value.items():
            problem = problem_of_word(f"{key}.{name}", item)
            if problem:
                return problem
    fixed = SEARCH_PATH if key == SEARCH_PATH.key else FIXED.get(key)
    if fixed is None or value in fixed.values:
        return None
    return fixed.problem(value)


def problems_of_presets(hydra: DictConfig, is_sweep: bool) -> Iterator[tuple[str, Problem]]:
    """The keys that a composed `hydra` section must not change, and what is wrong with each."""
    from hydra.types import RunMode

    found = OmegaConf.to_container(hydra, resolve=False)
    for key, fixed in FIXED.items():
        if not (is_sweep or fixed.acts_on_runs):
            continue
        value: Any = found
        for name in key.split(".")[1:]:
            value = value[name]
        if value not in fixed.values:
            yield key, fixed.problem(value)
    if hydra.mode == RunMode.MULTIRUN and not is_sweep:
        rule = "a preset cannot start a sweep"
        yield (
            "hydra.mode",
            Problem("hydra.mode=MULTIRUN", rule, "add -m to the command, or leave the key out"),
        )
