"""Checks of the code that a config names: may it be loaded, and is it there? Nothing is imported to
find out."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_train.config import metrics
from ddp_train.config.values import is_secret, leaves
from ddp_train.distributed.world import World
from ddp_train.hardware import Hardware
from ddp_train.options.custom import CustomConfig, hooks_of, tracker_key, trackers_of
from ddp_train.options.schema import Config
from ddp_train.text import shown

TRUSTED_MODULES = (
    "ddp_train.data.shards",
    "ddp_train.models",
    "ddp_train.optim",
    "ddp_train.tasks",
    "torch.nn",
    "torch.optim",
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
    "must be a class with a method act, or __enter__ and __exit__, called as Class(job, run_dir,"
    " world)"
)
TRACKER_RULE = (
    "must be a class derived from ddp_train.Tracker, with the methods open, write and close"
)
TRUSTED_TRACKERS = ("ddp_train.telemetry.trackers",)
_DOTTED_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"


def _code(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """Whether the code that `_target_` and `hooks` name may be loaded. Nothing is imported to find
    out."""
    problems = []
    for section, custom in _own_code(config).items():
        inner = next(
            (path for path, _ in leaves(custom.values()) if "_target_" in path.split(".")), None
        )
        if inner:
            if section == "data":
                also = "; transforms stand in data.transform and data.test_transform"
            else:
                also = ""
            problems.append(
                f"{section}.{inner}: arguments are plain values; only {section}._target_ names"
                f" code{also}"
            )
        if not custom.target and "target" in custom.arguments:
            typed = shown(custom.arguments["target"])
            problems.append(
                f"{section}.target={typed}: the key is {section}._target_; use"
                f" {section}._target_={typed}"
            )
            continue
        problems += code_problems(section, custom, config.trusted_modules)
    for found, hook in hooks_of(config.hooks).items():
        problems += _not_loadable(
            found, hook.target, TRUSTED_HOOKS, config.trusted_modules
        ) or _no_hook(found, hook.target)
    for name, tracker in trackers_of(config.tracker.classes).items():
        found = f"{tracker_key(name)}._target_={tracker.target}"
        problems += _not_loadable(found, tracker.target, TRUSTED_TRACKERS, config.trusted_modules)
    return problems


def code_problems(section: str, options: Any, trusted_modules: Sequence[str]) -> list[str]:
    """Why the code that a section names cannot be loaded. options: those of the section, a class of
    ours or yours."""
    code = options.code() if isinstance(options, CustomConfig) else []
    named = [(f"{section}.{key}={shown(path or None)}", path) for key, path in code]
    trusted = trusted_for(section)
    return [
        problem
        for found, path in named
        for problem in _not_loadable(found, path, trusted, list(trusted_modules))
    ]


def _own_code(config: Config) -> dict[str, CustomConfig]:
    """The user's own classes and functions, by the key that holds their `_target_`."""
    sections = {
        section: getattr(config, section) for section in ("model", "task", "data", "optimizer")
    }
    own = {
        section: custom for section, custom in sections.items() if isinstance(custom, CustomConfig)
    }
    missing = () if _has_metrics() else (f"{metrics.LIBRARY}.",)  # said once, by `_further_metrics`
    if config.mode == "export":  # nothing else is built
        return {section: custom for section, custom in own.items() if section == "model"}
    return own | {
        one.key: one.custom
        for one in metrics.further(config)
        if not one.custom.target.startswith(missing)
    }


def trusted_for(section: str) -> tuple[str, ...]:
    """The modules whose code a `_target_` may name, wherever it comes from."""
    if section.startswith("metrics["):
        return TRUSTED_METRICS
    return TRUSTED_MODULES


def _not_loadable(
    found: str, path: str, trusted: tuple[str, ...], trusted_modules: list[str]
) -> list[str]:
    """Why a dotted path cannot be loaded. found: its key and value, for the message."""
    package = path.partition(".")[0]
    if not re.fullmatch(_DOTTED_PATH, path):
        return [f"{found}: must be a dotted path, package.Name"]
    if not is_trusted(path, [*trusted, *trusted_modules]):
        if len(trusted) < 5:
            where = ", ".join(trusted)
        else:
            where = "the modules trusted by default (SECURITY.md)"
        return [
            f"{found}: loads code from outside {where}; if you trust it, add"
            f" trusted_modules=[{package}]"
        ]
    spec = importlib.util.find_spec(package)
    if spec is None:
        return [
            f"{found}: no module {package} in {Path.cwd()} or installed; for code elsewhere set"
            " PYTHONPATH"
        ]
    here = [
        place
        for place in (Path(package), Path(f"{package}.py"))
        if place.is_file() or any(place.glob("*.py"))
    ]
    origin = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    if (
        here
        and not is_trusted(path, trusted)
        and not Path(origin).resolve().is_relative_to(Path.cwd())
    ):
        return [
            f"{found}: {here[0]} in this folder is hidden by {origin}; rename it, or set"
            " PYTHONPATH=."
        ]
    return []


def _no_hook(found: str, path: str) -> list[str]:
    """Why a dotted path names no hook, by the source of its module. What that does not show (names
    that are imported, base classes, decorators) `user_code.build_hooks` finds out in the workers.
    found: as above."""
    package, *inner, name = path.split(".")
    spec = importlib.util.find_spec(
        package
    )  # of a module inside, it would import the packages above
    places = [Path(root, *inner) for root in (spec and spec.submodule_search_locations) or []]
    files = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py"))]
    files = files if inner else [Path((spec and spec.origin) or "")]
    try:
        source = ast.parse(
            next((file for file in files if file.is_file()), Path()).read_bytes()
        ).body
    except (OSError, SyntaxError, ValueError):  # none, or the worker shows where it is wrong
        return []
    what = ""
    match [statement for statement in source if name in _bound([statement])][-1:]:
        case [ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Assign(value=ast.Lambda())]:
            what = "a function"
        case [ast.Assign(value=ast.Constant() | ast.List() | ast.Tuple() | ast.Dict())]:
            what = "a value"
        case [ast.ClassDef(bases=[], keywords=[], decorator_list=[], body=body)]:
            if {"__enter__", "__exit__"} <= _bound(body) or "act" in _bound(body):
                what = ""
            else:
                what = "a class without them"
    return [f"{found}: {HOOK_RULE}, and is {what}"] if what else []


def _bound(statements: Sequence[ast.stmt]) -> set[str]:
    """The names that definitions and assignments bind."""
    targets = [
        target
        for statement in statements
        for target in (statement, *getattr(statement, "targets", ()))
    ]
    return {getattr(target, "name", getattr(target, "id", "")) for target in targets}


def package_of(path: str) -> list[str]:
    """The top package of a dotted path that lies outside of the modules trusted by default; none if
    it lies inside."""
    well_formed = re.fullmatch(_DOTTED_PATH, path)
    if well_formed and not is_trusted(path, TRUSTED_MODULES):
        return [path.partition(".")[0]]
    return []


def is_trusted(path: str, modules: Sequence[str]) -> bool:
    """Whether a dotted path lies inside one of the modules."""
    return any(f"{path}.".startswith(f"{module}.") for module in modules)


def _secrets(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """The config is written to files, terminals and checkpoints, so secrets must stay in the
    environment."""
    hooks = {found.partition(".")[0]: hook for found, hook in hooks_of(config.hooks).items()}
    trackers = trackers_of(config.tracker.classes)
    own_code = _own_code(config) | hooks
    own_code |= {tracker_key(name): tracker for name, tracker in trackers.items()}
    return [
        f"{section}.{path}=(hidden): the config is written to files, so it must hold no secret; put"
        f" it into the environment: {section}.{path}='${{oc.env:NAME}}'"
        for section, custom in own_code.items()
        for path, value in leaves(custom.all_values())
        if is_secret(path)
        and isinstance(value, str)
        and value
        and not re.fullmatch(r"\$\{oc\.env:\w+\}", value)
    ]


def _further_metrics(
    asked: Config, config: Config, hardware: Hardware, world: World | None
) -> list[str]:
    if not config.metrics or _has_metrics():
        return []
    return [
        f"metrics=[...]: {metrics.LIBRARY} is not installed; run {sys.executable} -m pip install"
        " '.[metrics]'"
    ]


def _has_metrics() -> bool:
    """Whether the library of `metrics` is installed. It is not imported: it imports torch."""
    return bool((spec := importlib.util.find_spec(metrics.LIBRARY)) and spec.origin)


CHECKS = (_code, _secrets, _further_metrics)
