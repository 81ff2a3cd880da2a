"""Checks of the code that a config names: may it be loaded, and is it there?

Nothing is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddp_train.config import metrics
from ddp_train.config.packages import how_to_install_extra, is_installed
from ddp_train.config.values import is_secret, leaves
from ddp_train.options.custom import CustomOption, hooks_of, tracker_key, trackers_of
from ddp_train.options.problem import Problem
from ddp_train.options.schema import Config
from ddp_train.text import did_you_mean, shown

TRUSTED_MODULES = (
    "ddp_train.data.shards",
    "ddp_train.models",
    "ddp_train.optim",
    "ddp_train.tasks",
    "torch.nn",
    "torch.optim",
    "torch.utils.data.RandomSampler",
    "torch.utils.data.SequentialSampler",
    "torch.utils.data.SubsetRandomSampler",
    "torch.utils.data.WeightedRandomSampler",
    "torch.utils.data.sampler",
    "torchvision.datasets",
    "torchvision.models",
    "torchvision.transforms",
)

TRUSTED_METRICS = tuple(
    f"torchmetrics.{name}"
    for name in ("aggregation", "classification", "detection", "regression", "segmentation")
)
"""Not all of torchmetrics: other modules of it load models that an argument names."""
TRUSTED_HOOKS = ("ddp_lab.study",)
HOOK_RULE = (
    "must be a class with a method act, or with __enter__ and __exit__; Class(job, run_dir, world)"
    " creates the hook"
)
HOOK_METHODS = ({"act"}, {"__enter__", "__exit__"})
"""Methods of a hook: all of one of the sets."""
TRACKER_RULE = (
    "must be a class derived from ddp_train.Tracker, with the methods open, write and close"
)
TRACKER_METHODS = ({"open", "write", "close"},)
TRUSTED_TRACKERS = ("ddp_train.telemetry.trackers",)
_DOTTED_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"


def problems(config: Config) -> Iterator[Problem]:
    yield from code_named(config)
    yield from secrets(config)
    yield from metrics_missing(config)


def code_named(config: Config) -> Iterator[Problem]:
    """Code that `_target_`, `hooks` and `tracker` name, if it is missing or not trusted."""
    trusted = config.trusted_modules
    for section, option in _own_options(config).items():
        yield from _problems_of_option(section, option, trusted)
    for option, given in config.data.samplers().items():
        sampler = given.get("_target_")
        if isinstance(sampler, str) and not config.uses_trained:
            found = f"{option}._target_={sampler}"
            yield from loading_problems(found, sampler, TRUSTED_MODULES, trusted)
    for metric in _own_metrics(config):
        target = metric.code.target
        found = f"{metric.key}._target_={shown(target or None)}"
        yield from _inner_code(metric.key, metric.code.arguments)
        yield from loading_problems(found, target, TRUSTED_METRICS, trusted)
    for found, hook in hooks_of(config.hooks).items():
        wrong = list(loading_problems(found, hook.target, TRUSTED_HOOKS, trusted))
        yield from wrong or _wrong_class(found, hook.target, HOOK_RULE, HOOK_METHODS)
    for name, tracker in trackers_of(config.tracker.classes).items():
        found = f"{tracker_key(name)}._target_={tracker.target}"
        wrong = list(loading_problems(found, tracker.target, TRUSTED_TRACKERS, trusted))
        yield from wrong or _wrong_class(found, tracker.target, TRACKER_RULE, TRACKER_METHODS)


def _problems_of_option(
    section: str, option: CustomOption, trusted_modules: list[str]
) -> Iterator[Problem]:
    yield from _inner_code(section, option.values())
    if not option.target and "target" in option.arguments:
        typed = shown(option.arguments["target"])
        yield Problem(
            f"{section}.target={typed}",
            f"the key is {section}._target_",
            f"use {section}._target_={typed}",
        )
        return
    yield from problems_of_paths(section, option, trusted_modules)


def _inner_code(section: str, values: dict[str, Any]) -> Iterator[Problem]:
    """The first argument that names code: only `_target_` of the section may."""
    paths = [path for path, _ in leaves(values) if "_target_" in path.split(".")]
    if not paths:
        return
    remedy = ""
    if section == "data":
        remedy = "for transforms use data.transform and data.test_transform"
    yield Problem(
        f"{section}.{paths[0]}",
        f"arguments must be plain values, since only {section}._target_ may name code",
        remedy,
    )


def code_problems(section: str, option: Any, trusted_modules: Sequence[str]) -> list[str]:
    """The messages of `problems_of_paths`."""
    return [str(problem) for problem in problems_of_paths(section, option, trusted_modules)]


def problems_of_paths(
    section: str, option: Any, trusted_modules: Sequence[str]
) -> Iterator[Problem]:
    """Problems of code that a section names, if it may not be loaded.

    option: a class of ours, or of the user's.
    """
    if not isinstance(option, CustomOption):
        return
    for name, path in option.paths():
        found = f"{section}.{name}={shown(path or None)}"
        yield from loading_problems(found, path, TRUSTED_MODULES, trusted_modules)


def _own_options(config: Config) -> dict[str, CustomOption]:
    """The options that are code of your own, by their groups."""
    options: dict[str, Any] = {"model": config.model}
    if config.mode != "export":  # it builds nothing but the model
        options |= {"task": config.task, "data": config.data, "optimizer": config.optimizer}
    if not config.uses_trained:
        options["schedule"] = config.schedule
    return {group: option for group, option in options.items() if isinstance(option, CustomOption)}


def _own_metrics(config: Config) -> list[metrics.FurtherMetric]:
    """The further metrics, without those of a library that `metrics_missing` reports."""
    if config.mode == "export":
        return []
    found = metrics.further_metrics(config)
    if is_installed(metrics.LIBRARY):
        return found
    return [item for item in found if not item.code.target.startswith(f"{metrics.LIBRARY}.")]


def trusted_for(section: str) -> tuple[str, ...]:
    """The modules whose code a `_target_` may name, wherever it comes from."""
    if section.startswith("metrics["):
        return TRUSTED_METRICS
    return TRUSTED_MODULES


def loading_problems(
    found: str, path: str, trusted: tuple[str, ...], trusted_modules: Sequence[str]
) -> Iterator[Problem]:
    """Problems of a dotted path, if its code may not or cannot be loaded.

    found: its key and value, for the message.
    """
    package = path.partition(".")[0]
    if not re.fullmatch(_DOTTED_PATH, path):
        yield Problem(found, "must be a dotted path, package.Name")
        return
    if not is_trusted(path, [*trusted, *trusted_modules]):
        where = ", ".join(trusted)
        if trusted == TRUSTED_MODULES:
            where = "the packages trusted by default"
        modules = ",".join([*trusted_modules, package])
        yield Problem(
            found,
            f"loads code from outside {where}",
            f"if you trust it, add 'trusted_modules=[{modules}]'",
        )
        return
    spec = importlib.util.find_spec(package)
    if spec is None:
        yield Problem(
            found,
            f"no module {package} is in {Path.cwd()} or installed",
            "if it is in another folder, set PYTHONPATH=FOLDER",
        )
        return
    origin = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    hidden = _in_this_folder(package)
    is_elsewhere = not Path(origin).resolve().is_relative_to(Path.cwd())
    if hidden and is_elsewhere and not is_trusted(path, trusted):
        yield Problem(
            found,
            f"Python would import {origin} in place of {hidden} in this folder",
            f"rename {hidden}, or set PYTHONPATH=.",
        )


def _in_this_folder(package: str) -> Path | None:
    """The file or folder of the working folder that would be imported by this name."""
    for place in (Path(package), Path(f"{package}.py")):
        if place.is_file() or any(place.glob("*.py")):
            return place
    return None


def _wrong_class(
    found: str, path: str, rule: str, interfaces: Sequence[set[str]]
) -> Iterator[Problem]:
    """Check a dotted path that must name a class with certain methods, by the source of its module.

    The module is not imported. Imported names, base classes and decorators are therefore not
    followed; `user_code` checks these in the workers.

    found: key and value, for the message.
    path: the dotted path, `package.module.Class`.
    rule: what the class must be, for the message.
    interfaces: sets of method names; the class must have all methods of one set.

    Yields at most one problem.
    """
    module, _, name = path.rpartition(".")
    statements = _statements_of(path)
    names = _names_in(statements)
    if names and name not in names:
        yield Problem(found, f"{module} has no {name}{did_you_mean(name, sorted(names))}")
        return
    kind = _wrong_kind(statements, name, interfaces)
    if kind:
        yield Problem(found, f"{path} is {kind}; it {rule}")


def _statements_of(path: str) -> list[ast.stmt]:
    """The source of the module in a dotted path; [] if there is none, or it cannot be parsed."""
    package, *inner, _ = path.split(".")
    # The spec of the package alone: for one of a module inside, Python would import the package.
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    if inner:
        places = [Path(root, *inner) for root in spec.submodule_search_locations or []]
        files = [file for at in places for file in (at / "__init__.py", at.with_suffix(".py"))]
    else:
        files = [Path(spec.origin or "")]
    try:
        file = next((file for file in files if file.is_file()), Path())
        return ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # the worker shows where it is wrong
        return []


def _names_in(statements: list[ast.stmt]) -> set[str]:
    """All names in the source of a module; none if it may have others."""
    names = set()
    for node in ast.walk(ast.Module(statements, [])):
        match node:
            case ast.alias(name="*") | ast.FunctionDef(name="__getattr__"):
                return set()
            case ast.Name(id="globals" | "setattr" | "exec"):
                return set()
            case ast.alias(name=module, asname=None):
                names.add(module.partition(".")[0])
            case ast.alias(asname=str(name)) | ast.Name(id=name):
                names.add(name)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
    return names


def _wrong_kind(statements: list[ast.stmt], name: str, interfaces: Sequence[set[str]]) -> str:
    """The kind of object that a name is bound to at last; "" if it may be such a class."""
    bindings = [statement for statement in statements if name in _bound([statement])]
    match bindings[-1:]:
        case [ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Assign(value=ast.Lambda())]:
            return "a function, no class"
        case [ast.Assign(value=ast.Constant() | ast.List() | ast.Tuple() | ast.Dict())]:
            return "a value, no class"
        case [ast.ClassDef(bases=[], keywords=[], decorator_list=[], body=body)]:
            methods = _bound(body)
            if not any(needed <= methods for needed in interfaces):
                return "a class that lacks methods"
    return ""


def _bound(statements: Sequence[ast.stmt]) -> set[str]:
    """The names that definitions and assignments bind."""
    targets = [
        target
        for statement in statements
        for target in (statement, *getattr(statement, "targets", ()))
    ]
    return {getattr(target, "name", getattr(target, "id", "")) for target in targets}


def package_of(path: str) -> list[str]:
    """The top package of a dotted path; none if it lies in a module trusted by default."""
    well_formed = re.fullmatch(_DOTTED_PATH, path)
    if well_formed and not is_trusted(path, TRUSTED_MODULES):
        return [path.partition(".")[0]]
    return []


def is_trusted(path: str, modules: Sequence[str]) -> bool:
    """Tell whether a dotted path lies inside one of the modules."""
    return any(f"{path}.".startswith(f"{module}.") for module in modules)


def secrets(config: Config) -> Iterator[Problem]:
    """Secrets that stand in the config, which is written to files, terminals and checkpoints."""
    values: dict[str, dict[str, Any]] = {}
    for group, option in _own_options(config).items():
        values[group] = option.all_values()
    for metric in _own_metrics(config):
        values[metric.key] = metric.code.arguments
    for found, hook in hooks_of(config.hooks).items():
        values[found.partition(".")[0]] = hook.arguments
    for name, tracker in trackers_of(config.tracker.classes).items():
        values[tracker_key(name)] = tracker.arguments
    for section, content in values.items():
        for path, value in leaves(content):
            is_reference = re.fullmatch(r"\$\{oc\.env:\w+\}", str(value))
            if is_secret(path) and isinstance(value, str) and value and not is_reference:
                yield Problem(
                    f"{section}.{path}=(hidden)",
                    "the config is written to files, so no key may hold a secret",
                    "put the secret into an environment variable, and use"
                    f" {section}.{path}='${{oc.env:NAME}}'",
                )


def metrics_missing(config: Config) -> Iterator[Problem]:
    """Further metrics without the library that has them."""
    if config.metrics and not is_installed(metrics.LIBRARY):
        remedy = how_to_install_extra("metrics")
        yield Problem("metrics=[...]", f"{metrics.LIBRARY} is not installed", remedy)
