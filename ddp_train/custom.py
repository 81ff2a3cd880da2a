"""Anyone's own class or function, by its dotted path. `config.check` has already decided that it may be loaded."""

from __future__ import annotations

import importlib
from typing import Any

from ddp_train.config.schema import CustomConfig
from ddp_train.errors import ConfigError


def call(section: str, custom: CustomConfig, *args: Any, **more: Any) -> Any:
    """Imports `custom.target` and calls it. Raises ConfigError if it does not exist or refuses its arguments."""
    found = f"{section}._target_={custom.target}"
    module_path, _, name = custom.target.rpartition(".")
    try:
        target = getattr(importlib.import_module(module_path), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError([f"{found}: {error}"]) from error
    try:
        return target(*args, **custom.arguments, **more)
    except TypeError as error:
        arguments = ", ".join(f"{key}={value!r}" for key, value in {**custom.arguments, **more}.items())
        raise ConfigError([f"{found}: cannot be called with {arguments}: {error}"]) from error
