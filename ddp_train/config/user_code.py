"""Anyone's own class or function, by its dotted path. `config.check` has already decided that it may be loaded."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from ddp_train.config.external_checks import TRUSTED_MODULES, is_trusted
from ddp_train.config.schema import CustomConfig
from ddp_train.config.values import from_environment
from ddp_train.errors import ConfigError
from ddp_train.text import did_you_mean


def instantiate(section: str, custom: CustomConfig, *args: Any, **more: Any) -> Any:
    """Imports `custom.target` and calls it, with the values of `${oc.env:...}` among its arguments.

    Raises ConfigError if it does not exist, is not what it seems, or has no such arguments; what it raises itself comes
    through.
    """
    found = f"{section}._target_={custom.target}"
    module_path, _, name = custom.target.rpartition(".")
    try:
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        if not f"{module_path}.".startswith(f"{error.name}."):
            raise  # it exists, and misses a module itself
        raise ConfigError([f"{found}: {error}"]) from error
    if not hasattr(module, name):
        raise ConfigError([f"{found}: {module_path} has no {name}{did_you_mean(name, dir(module))}"])
    target = getattr(module, name)
    if is_trusted(custom.target, []) and not _is_harmless(target):
        raise ConfigError([f"{found}: neither a class of {', '.join(TRUSTED_MODULES)} nor a model of torchvision"])
    if not callable(target):
        raise ConfigError([f"{found}: is of type {type(target).__name__}, which cannot be called"])
    values = from_environment(custom.arguments, section)
    try:
        inspect.signature(target).bind(*args, **values, **more)
    except TypeError as error:  # with the arguments as they were written: a value of the environment may be a secret
        arguments = ", ".join(f"{key}={value!r}" for key, value in {**custom.arguments, **more}.items())
        theirs = [key for key in list(inspect.signature(target).parameters)[len(args) :] if key not in more]
        unknown = next((key for key in custom.arguments if key not in theirs), "")  # which Python names, too
        guess = did_you_mean(unknown, theirs)
        raise ConfigError([f"{found}: cannot be called with {arguments}: {error}{guess}"]) from error
    except ValueError:  # written in C, without a signature: the call itself will tell
        pass
    return target(*args, **values, **more)


def _is_harmless(target: Any) -> bool:
    """Whether what a module that we trust by ourselves holds under some name may be called with anyone's arguments.

    Modules hold names of other modules too (torchvision.datasets.utils.zipfile), and functions that write files or
    fetch them (torchvision.datasets.utils.download_url).
    """
    made_in = str(getattr(target, "__module__", ""))
    if isinstance(target, type):
        return is_trusted(made_in, [])
    return callable(target) and f"{made_in}.".startswith("torchvision.models.")
