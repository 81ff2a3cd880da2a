"""A sweep as Hydra composes it, before any trial: its launcher and its sweeper."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig

from ddp_train.config.presets import register_schema, search_path_of
from ddp_train.config.program import Program


@contextlib.contextmanager
def composed_sweep(program: Program, arguments: list[str]) -> Iterator[DictConfig]:
    """The config of a sweep, without the keys that are swept. Hydra is initialized inside.

    Raises what Hydra and OmegaConf raise.
    """
    for name in ("launcher", "optuna_sweeper"):  # an editable install may hide them from Hydra
        importlib.import_module(f"hydra_plugins.ddp_train_pool.{name}")
    register_schema(program)
    with hydra.initialize_config_dir(str(program.presets), version_base="1.3"):
        application = GlobalHydra.instance().hydra
        assert application is not None
        yield application.compose_config(
            "config",
            [*arguments, *search_path_of(program)],
            run_mode=RunMode.MULTIRUN,
            from_shell=False,
            with_log_configuration=False,
        )
