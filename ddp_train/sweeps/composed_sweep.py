"""A sweep as Hydra composes it, before any trial: its launcher and its sweeper."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager

from omegaconf import DictConfig

from ddp_train.config.presets import composed
from ddp_train.config.program import Program


def composed_sweep(program: Program, arguments: list[str]) -> AbstractContextManager[DictConfig]:
    """The config of a sweep, without the keys that are swept, see `presets.composed`."""
    for name in ("launcher", "optuna_sweeper"):  # an editable install may hide them from Hydra
        importlib.import_module(f"hydra_plugins.ddp_train_pool.{name}")
    return composed(program, arguments, is_sweep=True)
