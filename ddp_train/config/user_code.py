"""Import and call of the user's own classes and functions.

`config.code_checks` has decided that they may be loaded. The functions of this module raise
ConfigError for a name that does not exist, is not callable, or does not take its arguments.
"""

from __future__ import annotations

import enum
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
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
from ddp_train.config.packages import how_to_install, is_installed
from ddp_train.config.values import from_environment
from ddp_train.errors import ConfigError
from ddp_train.options.custom import (
    FUNCTIONS_OF_SCHEDULERS,
    TORCH_SCHEDULERS,
    Code,
    code_of,
    hooks_of,
    tracker_key,
    trackers_of,
)
from ddp_train.telemetry.trackers.tracker import Tracker
from ddp_train.text import did_you_mean

LONGEST_ARGUMENT = 100
"""Letters of an argument in a message."""
PASSED_BY_POSITION = {
    "hooks": ("job", "run_dir", "world"),
    "optimizer": ("params",),
    "schedule": ("optimizer",),
}
"""Names of the arguments that the code of a section is called with by position."""
BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def instantiate(section: str, code: Code, *args: Any, **more: Any) -> Any:
    """Import `code.target` and call it, with the values of `${oc.env:...}` among its arguments.

    Exceptions of the call itself are passed on.
    """
    target = _target_of(section, code)
    return _called(_found(section, code), section, target, code.arguments, *args, **more)


def _called(
    found: str, section: str, target: Any, arguments: dict[str, Any], *args: Any, **more: Any
) -> Any:
    """Call a class or function, with values of the environment.

    found: key and value, for messages.
    """
    values = from_environment(arguments, section)
    try:
        inspect.signature(target).bind(*args, **values, **more)
    except TypeError as error:
        rule = _wrong_position(section, target, arguments, len(args))
        if not rule:
            rule = _wrong_arguments(section, target, arguments, len(args), more, error)
        raise ConfigError([f"{found}: {rule}"]) from error
    except ValueError:  # written in C, without a signature: the call itself fails
        pass
    return target(*args, **values, **more)


def _wrong_position(section: str, target: Any, arguments: dict[str, Any], count: int) -> str:
    """The rule if a signature does not take the arguments that we pass by position; else "".

    count: of the arguments that are passed by position.
    """
    match = re.match(r"\w+", section)
    names = PASSED_BY_POSITION.get(match[0] if match else "", ())[:count]
    parameters = inspect.signature(target).parameters.values()
    accepted = [item.name for item in parameters if item.kind in BY_POSITION]
    takes_any = any(item.kind is inspect.Parameter.VAR_POSITIONAL for item in parameters)
    is_short = len(accepted) < count and not takes_any
    given_twice = set(accepted[:count]) & set(arguments)
    if not names or not (is_short or given_twice):
        return ""
    callee = getattr(target, "__name__", "it")
    if isinstance(target, type):
        callee += ".__init__"
    has = f"({', '.join(accepted)})" if accepted else "no arguments"
    wanted = [*names, *(name for name in accepted if name not in names)]
    return (
        f"is called with the arguments ({', '.join(names)}), but {callee} accepts {has}; let"
        f" {callee} accept ({', '.join(wanted)})"
    )


def _wrong_arguments(
    section: str,
    target: Any,
    arguments: dict[str, Any],
    count: int,
    more: dict[str, Any],
    error: TypeError,
) -> str:
    """The rule for arguments by name that a signature does not take.

    count: of the arguments that are passed by position.
    more: arguments that we pass by name.
    error: of Python, about the signature.
    """
    # The arguments as written: a value of the environment may be a secret.
    given = {**arguments, **more}
    written = ", ".join(f"{key}={_shortened(repr(value))}" for key, value in given.items())
    parameters = list(inspect.signature(target).parameters)[count:]
    free = [name for name in parameters if name not in more]
    # The one that Python names, too.
    unknown = next((key for key in arguments if key not in free), "")
    guess = did_you_mean(unknown, free)
    if not guess and f"'{unknown}'" in str(error):
        guess = f"; remove {section}.{unknown}"
    return f"cannot be called with {written or 'no arguments'}: {error}{guess}"


def _shortened(text: str) -> str:
    if len(text) <= LONGEST_ARGUMENT:
        return text
    return f"{text[: LONGEST_ARGUMENT - 3]}..."


def parameters_of(section: str, code: Code) -> list[str]:
    """The names of the parameters that `code.target` takes; [] if it does not say."""
    return list(_parameters(_target_of(section, code)))


def call_of(section: str, code: Code) -> dict[str, Any]:
    """The arguments that `code.target` is called with, the defaults of its signature included.

    Those given, if they do not fit the signature, or there is none.
    """
    target = _target_of(section, code)
    try:
        bound = inspect.signature(target).bind(**code.arguments)
    except (TypeError, ValueError):
        return dict(code.arguments)
    bound.apply_defaults()
    call: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            call |= value
        else:
            call[name] = value
    return call


def _parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except ValueError:  # written in C
        return {}


def build_transforms(key: str, items: list[Any]) -> list[Callable[..., Any]]:
    """The transforms that `data.transform` or `data.test_transform` names, in its order."""
    return [_transform(f"{key}[{place}]", item) for place, item in enumerate(items)]


def _transform(key: str, item: Any) -> Callable[..., Any]:
    """An item, {_target_: PATH, ...} or PATH: a class, called with the arguments beside it."""
    code = code_of(item)
    found = _found(key, code)
    arguments = {name: _typed(f"{key}.{name}", value) for name, value in code.arguments.items()}
    for name, parameter in _parameters(_harmless(found, code.target)).items():
        kind = type(parameter.default)
        if issubclass(kind, enum.Enum) and arguments.get(name) in [item.value for item in kind]:
            arguments[name] = kind(arguments[name])  # policy: cifar10, interpolation: bicubic
    transform = instantiate(key, Code(code.target, arguments))
    if not callable(transform):
        rule = f"returns an object of {type(transform).__name__}, which is not callable"
        remedy = "name a class with __call__, or a function that returns a function"
        raise ConfigError([f"{found}: {rule}; {remedy}"])
    return transform


def _typed(key: str, value: Any) -> Any:
    """An argument of a transform: one within it, a torch.dtype by its name, or the value."""
    if isinstance(value, dict) and "_target_" in value:
        return _transform(key, value)
    if isinstance(value, dict):
        return {name: _typed(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list):
        return [_typed(f"{key}[{place}]", item) for place, item in enumerate(value)]
    if isinstance(value, str) and value.startswith("torch."):
        import torch

        dtype = getattr(torch, value.removeprefix("torch."), None)
        return dtype if isinstance(dtype, torch.dtype) else value
    return value


def takes_optimizer(section: str, code: Code) -> bool:
    """Tell whether `code.target` makes a scheduler for an optimizer; else it is a function."""
    target = _target_of(section, code)
    return isinstance(target, type) or "optimizer" in _parameters(target)


def build_scheduler(key: str, code: Code, optimizer: Any) -> Any:
    """A scheduler that `schedule` names, on an optimizer, with those that its arguments name.

    Exceptions of torch about arguments are passed on.
    """
    arguments = {
        name: _of_scheduler(f"{key}.{name}", name, value, optimizer)
        for name, value in code.arguments.items()
    }
    # ChainedScheduler and its like have it from the schedulers that they are given.
    first = next(iter(_parameters(_target_of(key, code))), "optimizer")
    if first == "schedulers":
        return instantiate(key, Code(code.target, arguments))
    return instantiate(key, Code(code.target, arguments), optimizer)


def _of_scheduler(key: str, name: str, value: Any, optimizer: Any) -> Any:
    """An argument of a scheduler: a scheduler within it, a function, or the value."""
    if isinstance(value, list):
        return [
            _of_scheduler(f"{key}[{place}]", name, item, optimizer)
            for place, item in enumerate(value)
        ]
    if name in FUNCTIONS_OF_SCHEDULERS and isinstance(value, str):
        return named_function(key, value)
    if not isinstance(value, dict) or "_target_" not in value:
        return value
    code = code_of(value)
    if takes_optimizer(key, code):
        return build_scheduler(key, code, optimizer)
    return partial(_target_of(key, code), **code.arguments)


def named_function(key: str, path: str) -> Callable[..., Any]:
    """The function that a key names."""
    return _harmless(f"{key}={path}", path)


def _found(section: str, code: Code) -> str:
    """Key and value, for messages."""
    return f"{section}._target_={code.target}"


def _target_of(section: str, code: Code) -> Any:
    return _harmless(_found(section, code), code.target, trusted_for(section))


def _harmless(found: str, path: str, trusted: tuple[str, ...] = TRUSTED_MODULES) -> Any:
    """The class or function at a dotted path, if it may be called.

    found: its key and value, for messages.
    trusted: modules from which only what is harmless may be named.
    """
    target = _imported(found, path)
    if is_trusted(path, trusted) and not _is_harmless(target, trusted):
        rule = f"must be a class of {', '.join(trusted)} or a model of torchvision"
        remedy = "call other functions in a class of your own"
        raise ConfigError([f"{found}: {rule}; {remedy}"])
    if not callable(target):
        rule = f"must be a class or function, and is of type {type(target).__name__}"
        raise ConfigError([f"{found}: {rule}"])
    return target


def build_hooks(items: list[Any], *args: Any) -> list[Any]:
    """Objects of the classes that `hooks` names, called with `args` and their own arguments."""
    return [_hook(found, hook, *args) for found, hook in hooks_of(items).items()]


def build_trackers(classes: dict[str, Any]) -> dict[str, Tracker]:
    """The trackers that `tracker.classes` names, by their names."""
    trackers = {}
    for name, code in trackers_of(classes).items():
        tracker = tracker_class(name, code)
        key = tracker_key(name)
        found = _found(key, code)
        missing = missing_package(tracker)
        if missing:
            rule = f"{missing} is not installed; {how_to_install(missing)}"
            raise ConfigError([f"{found}: {rule}"])
        trackers[name] = _called(found, key, tracker, code.arguments)
    return trackers


def tracker_class(name: str, code: Code) -> type[Tracker]:
    """The class of a tracker, imported."""
    found = _found(tracker_key(name), code)
    tracker = _imported(found, code.target)
    is_tracker = isinstance(tracker, type) and issubclass(tracker, Tracker)
    if not is_tracker or inspect.isabstract(tracker):
        raise ConfigError([f"{found}: {TRACKER_RULE}"])
    _check_origin(found, code, tracker, TRUSTED_TRACKERS)
    return tracker


def _check_origin(found: str, code: Code, target: type, trusted: tuple[str, ...]) -> None:
    """Raise ConfigError for a class that a trusted module has imported from elsewhere."""
    module = target.__module__
    if is_trusted(code.target, trusted) and not is_trusted(module, trusted):
        rule = f"its code is in {module}, which is not trusted"
        path = f"{module}.{target.__qualname__}"
        remedy = f"if you trust it, name it as {path}, and add 'trusted_modules=[{module}]'"
        raise ConfigError([f"{found}: {rule}; {remedy}"])


def missing_package(tracker: type[Tracker]) -> str | None:
    """The package that a tracker needs, if it is not installed."""
    if tracker.package is None or is_installed(tracker.package):
        return None
    return tracker.package


def _hook(found: str, code: Code, *args: Any) -> Any:
    hook = _imported(found, code.target)
    enters = hasattr(hook, "__enter__") and hasattr(hook, "__exit__")
    if not isinstance(hook, type) or not (enters or hasattr(hook, "act")):
        raise ConfigError([f"{found}: {HOOK_RULE}"])
    _check_origin(found, code, hook, TRUSTED_HOOKS)
    section = found.partition(".")[0]
    return _called(found, section, hook, code.arguments, *args)


def _imported(found: str, path: str) -> Any:
    """The object at a dotted path. found: its key and value, for messages."""
    module_path, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        if not f"{module_path}.".startswith(f"{error.name}."):
            raise  # it exists, and a module that it imports does not
        raise ConfigError([f"{found}: {error}; correct the path, or set PYTHONPATH"]) from error
    if not hasattr(module, name):
        guess = did_you_mean(name, dir(module))
        raise ConfigError([f"{found}: {module_path} has no {name}{guess}"])
    return getattr(module, name)


def _is_harmless(target: Any, trusted: tuple[str, ...]) -> bool:
    """Tell whether an attribute of a trusted module may be called with arbitrary arguments.

    Modules also hold names of other modules (torchvision.datasets.utils.zipfile), and functions
    that write files or fetch them (torchvision.datasets.utils.download_url).
    """
    made_in = str(getattr(target, "__module__", ""))
    if isinstance(target, type):
        return is_trusted(made_in, trusted)
    return callable(target) and f"{made_in}.".startswith("torchvision.models.")


TORCH_CLASSES = {
    "optimizer": ("torch.optim", "Optimizer", "*.py"),
    "schedule": (TORCH_SCHEDULERS, "LRScheduler", "lr_scheduler.py"),
}
"""Module of torch's own classes of a group, the class that they derive from, and the files."""


def torch_classes(group: str, names: Iterable[str], options: Iterable[str]) -> list[str]:
    """Paths of torch's own optimizers or schedulers with these names, in letters of either case,
    that are not options of the group.

    torch, whose import takes seconds, is not imported. LBFGS needs a closure, which no step here
    has.
    """
    if group not in TORCH_CLASSES:
        return []
    wanted = {name.lower() for name in names} - {*options, "lbfgs"}
    spec = importlib.util.find_spec("torch") if wanted else None
    if spec is None:
        return []
    module, base, files = TORCH_CLASSES[group]
    classes: list[str] = []
    for file in sorted((Path(spec.origin or "").parent / "optim").glob(files)):
        classes += re.findall(rf"^class (\w+)\({base}\)", file.read_text(), re.M)
    return [f"{module}.{name}" for name in classes if name.lower() in wanted]
