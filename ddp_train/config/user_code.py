"""Imports and calls the user's own classes and functions. `config.code_checks` has decided that
they may be."""

from __future__ import annotations

import enum
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ddp_train.config.code_checks import (
    HOOK_RULE,
    TRACKER_RULE,
    TRUSTED_HOOKS,
    TRUSTED_MODULES,
    TRUSTED_TRACKERS,
    is_trusted,
    trusted_for,
)
from ddp_train.config.values import from_environment
from ddp_train.errors import ConfigError
from ddp_train.options.custom import Code, hooks_of, tracker_key, trackers_of
from ddp_train.telemetry.trackers.tracker import Tracker
from ddp_train.text import did_you_mean


def instantiate(section: str, code: Code, *args: Any, **more: Any) -> Any:
    """Imports `code.target` and calls it, with the values of `${oc.env:...}` among its arguments.

    Raises ConfigError if it does not exist, is not callable, or does not take these arguments.
    Exceptions of the call itself are passed on.
    """
    found, target = _target_of(section, code)
    return _called(found, section, target, code.arguments, *args, **more)


def _called(
    found: str, section: str, target: Any, arguments: dict[str, Any], *args: Any, **more: Any
) -> Any:
    """found: key and value, for messages."""
    values = from_environment(arguments, section)
    try:
        inspect.signature(target).bind(*args, **values, **more)
    except (
        TypeError
    ) as error:  # shows the arguments as written: a value of the environment may be a secret
        written = ", ".join(f"{key}={value!r}" for key, value in {**arguments, **more}.items())
        theirs = [
            key
            for key in list(inspect.signature(target).parameters)[len(args) :]
            if key not in more
        ]
        unknown = next(
            (key for key in arguments if key not in theirs), ""
        )  # the one that Python names, too
        guess = did_you_mean(unknown, theirs)
        raise ConfigError([f"{found}: cannot be called with {written}: {error}{guess}"]) from error
    except ValueError:  # written in C, without a signature: the call itself fails
        pass
    return target(*args, **values, **more)


def parameters_of(section: str, code: Code) -> list[str]:
    """The names of the parameters that `code.target` takes; [] if it does not say. Raises
    ConfigError as above."""
    return list(_parameters(_target_of(section, code)[1]))


def call_of(section: str, code: Code) -> dict[str, Any]:
    """What `code.target` is called with, the defaults of its signature included; if they do not
    fit it, or it does not say, what is given. Raises ConfigError as above."""
    try:
        signature = inspect.signature(_target_of(section, code)[1])
        bound = signature.bind(**code.arguments)
    except (TypeError, ValueError):
        return dict(code.arguments)
    bound.apply_defaults()
    further = {
        name
        for name, one in signature.parameters.items()
        if one.kind is inspect.Parameter.VAR_KEYWORD
    }
    found = {name: value for name, value in bound.arguments.items() if name not in further}
    return found | {name: value for one in further for name, value in bound.arguments[one].items()}


def _parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except ValueError:  # written in C
        return {}


def build_transforms(key: str, items: list[Any]) -> list[Callable[..., Any]]:
    """What `data.transform` or `data.test_transform` names, built in their order. Raises
    ConfigError as above."""
    return [_transform(f"{key}[{place}]", item) for place, item in enumerate(items)]


def _transform(key: str, item: Any) -> Callable[..., Any]:
    """An item, {_target_: PATH, ...} or PATH: a class, called with the arguments beside it."""
    values = dict(item) if isinstance(item, dict) else {"_target_": item}
    path = values.pop("_target_")
    arguments = {name: _typed(f"{key}.{name}", value) for name, value in values.items()}
    for name, parameter in _parameters(_harmless(f"{key}._target_={path}", path)).items():
        kind = type(parameter.default)
        if issubclass(kind, enum.Enum) and arguments.get(name) in [one.value for one in kind]:
            arguments[name] = kind(arguments[name])  # policy: cifar10, interpolation: bicubic
    made = instantiate(key, Code(path, arguments))
    if not callable(made):
        raise ConfigError(
            [
                f"{key}._target_={path}: made an object of {type(made).__name__}, which cannot be"
                " called"
            ]
        )
    return made


def _typed(key: str, value: Any) -> Any:
    """An argument of a transform as what it stands for: a transform within it, or a type of numbers
    (torch.float32)."""
    if isinstance(value, dict) and "_target_" in value:
        return _transform(key, value)
    if isinstance(value, dict):
        return {name: _typed(f"{key}.{name}", one) for name, one in value.items()}
    if isinstance(value, list):
        return [_typed(f"{key}[{place}]", one) for place, one in enumerate(value)]
    if isinstance(value, str) and value.startswith("torch."):
        import torch

        dtype = getattr(torch, value.removeprefix("torch."), None)
        return dtype if isinstance(dtype, torch.dtype) else value
    return value


def named_function(key: str, path: str) -> Callable[..., Any]:
    """The function that a key names. Raises ConfigError as above."""
    return _harmless(f"{key}={path}", path)


def _target_of(section: str, code: Code) -> tuple[str, Any]:
    """Key and value, for messages; and what they name."""
    found = f"{section}._target_={code.target}"
    return found, _harmless(found, code.target, trusted_for(section))


def _harmless(found: str, path: str, trusted: tuple[str, ...] = TRUSTED_MODULES) -> Any:
    """The class or function at a dotted path, if it may be called. found: its key and value, for
    messages. trusted: modules from which only what is harmless may be named."""
    target = _imported(found, path)
    if is_trusted(path, trusted) and not _is_harmless(target, trusted):
        rule = f"neither a class of {', '.join(trusted)} nor a model of torchvision"
        raise ConfigError(
            [
                f"{found}: {rule}, and nothing else may be named there; call it in a class of"
                " your own"
            ]
        )
    if not callable(target):
        raise ConfigError(
            [f"{found}: must be a class or function, and is of type {type(target).__name__}"]
        )
    return target


def build_hooks(items: list[Any], *args: Any) -> list[Any]:
    """Objects of the classes that `hooks` names, called with (job, run_dir, world) and their
    arguments. Raises ConfigError as above."""
    return [_hook(found, hook, *args) for found, hook in hooks_of(items).items()]


def build_trackers(classes: dict[str, Any]) -> dict[str, Tracker]:
    """The trackers that `tracker.classes` names, by their names. Raises ConfigError as above."""
    trackers = {}
    for name, code in trackers_of(classes).items():
        made = tracker_class(name, code)
        key = tracker_key(name)
        found = f"{key}._target_={code.target}"
        missing = missing_package(made)
        if missing:
            install = f"{sys.executable} -m pip install {missing}"
            raise ConfigError([f"{found}: {missing} is not installed; run {install}"])
        trackers[name] = _called(found, key, made, code.arguments)
    return trackers


def tracker_class(name: str, code: Code) -> type[Tracker]:
    """The class of a tracker, imported. Raises ConfigError as above."""
    found = f"{tracker_key(name)}._target_={code.target}"
    made = _imported(found, code.target)
    if not isinstance(made, type) or not issubclass(made, Tracker) or inspect.isabstract(made):
        raise ConfigError([f"{found}: {TRACKER_RULE}"])
    if is_trusted(code.target, TRUSTED_TRACKERS) and not is_trusted(
        made.__module__, TRUSTED_TRACKERS
    ):
        trusted = ", ".join(TRUSTED_TRACKERS)
        raise ConfigError([f"{found}: is a class of {made.__module__}, not of {trusted}"])
    return made


def missing_package(tracker: type[Tracker]) -> str | None:
    """The package that a tracker needs, if it is not installed. It is not imported: some take over
    a second."""
    if tracker.package is None:
        return None
    spec = importlib.util.find_spec(tracker.package)
    # A folder of that name, as wandb and mlflow make them, is found as a package without a file.
    if spec is None or spec.origin is None:
        return tracker.package
    return None


def _hook(found: str, hook: Code, *args: Any) -> Any:
    made = _imported(found, hook.target)
    made_in = str(getattr(made, "__module__", ""))
    enters = hasattr(made, "__enter__") and hasattr(made, "__exit__")
    if not isinstance(made, type) or not (enters or hasattr(made, "act")):
        raise ConfigError([f"{found}: {HOOK_RULE}"])
    if is_trusted(hook.target, TRUSTED_HOOKS) and not is_trusted(made_in, TRUSTED_HOOKS):
        raise ConfigError([f"{found}: is a class of {made_in}, not of {', '.join(TRUSTED_HOOKS)}"])
    return _called(found, found.partition(".")[0], made, hook.arguments, *args)


def _imported(found: str, path: str) -> Any:
    """The object at a dotted path. found: its key and value, for messages."""
    module_path, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        if not f"{module_path}.".startswith(f"{error.name}."):
            raise  # it exists, and a module that it imports does not
        raise ConfigError([f"{found}: {error}"]) from error
    if not hasattr(module, name):
        raise ConfigError(
            [f"{found}: {module_path} has no {name}{did_you_mean(name, dir(module))}"]
        )
    return getattr(module, name)


def _is_harmless(target: Any, trusted: tuple[str, ...]) -> bool:
    """Whether an attribute of a module trusted by default may be called with arbitrary arguments.

    Modules also hold names of other modules (torchvision.datasets.utils.zipfile), and functions
    that write files or fetch them (torchvision.datasets.utils.download_url).
    """
    made_in = str(getattr(target, "__module__", ""))
    if isinstance(target, type):
        return is_trusted(made_in, trusted)
    return callable(target) and f"{made_in}.".startswith("torchvision.models.")


def torch_optimizers(names: Iterable[str], options: Iterable[str]) -> list[str]:
    """The classes of torch.optim that are called so, in letters of either case, but for those that
    are options.

    torch, whose import takes seconds, is not imported. LBFGS needs a closure, which no step here
    has.
    """
    asked = {name.lower() for name in names} - {*options, "lbfgs"}
    spec = importlib.util.find_spec("torch") if asked else None
    files = sorted((Path(spec.origin or "").parent / "optim").glob("*.py")) if spec else []
    found = (
        name
        for file in files
        for name in re.findall(r"^class (\w+)\(Optimizer\)", file.read_text(), re.M)
    )
    return [f"torch.optim.{name}" for name in found if name.lower() in asked]
