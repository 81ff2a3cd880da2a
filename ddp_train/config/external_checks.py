"""Checks of what a config refers to: data, checkpoints, code, the run directory. Nothing is imported or written."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_train.config import metrics
from ddp_train.config.data_checks import missing_data, wrong_own_data
from ddp_train.config.hardware import Hardware
from ddp_train.config.migrate import bind_frozen, migrated
from ddp_train.config.options.custom import CustomConfig, CustomDataConfig
from ddp_train.config.options.model import GptConfig, TorchvisionConfig
from ddp_train.config.options.strategy import OrderedConfig
from ddp_train.config.schema import OPTIONS, SECTIONS, TRACKERS, Config
from ddp_train.config.values import is_secret, leaves
from ddp_train.distributed.world import World
from ddp_train.resilience.checkpoint_files import MANIFEST, places, read_manifest
from ddp_train.text import did_you_mean, shown

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
    f"torchmetrics.{name}" for name in ("aggregation", "classification", "regression", "segmentation")
)
"""Not all of torchmetrics: other modules of it load models that an argument names."""
TRUSTED_HOOKS = ("ddp_train.study",)
HOOK_RULE = "must be a class with __enter__ and __exit__, called as Class(job, run_dir, world)"
_DOTTED_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"


def _model(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    model, shape = config.model, config.data.image_shape()
    if model.takes_images and config.data.is_regression:
        return [
            f"model={model.name}: needs images, and data={config.data.name} is a table; use model=linear_regression or "
            "mlp"
        ]
    tokens = config.data.task == "language_model"
    if tokens and model.takes_tokens is False:
        return [f"model={model.name}: takes no tokens, and data={config.data.name} has nothing else; use model=gpt"]
    if model.takes_tokens and not tokens and not isinstance(config.data, CustomConfig):
        return [f"model={model.name}: needs tokens, and data={config.data.name} has none; use data=text"]
    if isinstance(model, GptConfig) and model.width % model.heads:
        several = model.width // model.heads * model.heads or model.heads
        return [
            f"model.width={model.width}: must be a multiple of model.heads={model.heads}; use model.width={several}"
        ]
    if shape and shape[1] < model.smallest_side:
        return [f"data.image_size={shape[1]}: model={model.name} halves its images; use at least {model.smallest_side}"]
    if shape and model.channels_taken and shape[0] not in model.channels_taken:
        allowed = " or ".join(map(str, model.channels_taken))
        return [f"data.channels={shape[0]}: model={model.name} takes {allowed}; use data.channels=3"]
    if isinstance(model, TorchvisionConfig) and model.arch not in (names := torchvision_classifiers()):
        return [f"model.arch={model.arch}: torchvision has no classifier of that name{did_you_mean(model.arch, names)}"]
    return []


def torchvision_classifiers() -> list[str]:
    """The classifiers of the installed torchvision, read from its source files: importing it takes over a second."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return []
    sources = Path(spec.submodule_search_locations[0], "models").glob("*.py")
    found = (re.findall(r"^@register_model\(.*?\)\n(?:@.*\n)*def (\w+)\(", path.read_text(), re.M) for path in sources)
    return sorted(name for names in found for name in names)


def _data(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    own = wrong_own_data(config.data) if isinstance(config.data, CustomDataConfig) else []
    return own if config.mode == "doctor" else own + missing_data(config)  # the doctor asks on every host


def _checkpoint(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        return [f"checkpoint.resume={resume}: no such folder; use auto, never, or the path of a run or a checkpoint"]
    if config.mode == "evaluate" and resume in ("auto", "never"):
        return [f"mode=evaluate: needs a checkpoint, checkpoint.resume={resume} names none; add checkpoint.resume=PATH"]
    if resume in ("auto", "never"):
        if config.checkpoint.which != "best":
            return []
        return [
            f"checkpoint.which=best: a run goes on from its last checkpoint, checkpoint.resume={resume}; to start from "
            "the best of another run use checkpoint.resume=RUN and another run_dir"
        ]
    if not _with_manifests(Path(resume)):
        return [f"checkpoint.resume={resume}: holds no checkpoint; use the path of a run or a checkpoint"]
    before = manifest_config(Path(resume))
    if config.mode == "evaluate" or not before:
        return []
    then = bind_frozen(before)[0]
    values = _of_the_state(then, config)
    if config.data.validation and then.data.name == config.data.name:  # else what it trained with would validate
        values["seed"] = then.seed, config.seed
        values["data.validation"] = then.data.validation, config.data.validation
    return _differences(values, f"checkpoint.resume={resume}", "checkpoint.resume=never")


def _with_manifests(resume: Path) -> list[Path]:
    """A checkpoint, or all checkpoints of a run, the newest first."""
    with contextlib.suppress(OSError):  # a name that is too long, which `check_rules` refuses later
        return [place for place in (resume, *places(resume)) if (place / MANIFEST).is_file()]
    return []


def manifest_config(resume: Path) -> dict[str, Any]:
    """The config of a checkpoint, or of the newest in a run, as plain values; {} if no manifest can be trusted."""
    for path in _with_manifests(resume):
        with contextlib.suppress(OSError, ValueError):  # corrupt: the worker skips it, with a warning
            if config := read_manifest(path).get("config"):
                sections = {**OPTIONS, **SECTIONS}
                return {k: v for k, v in migrated(config).items() if isinstance(v, dict) or k not in sections}
    return {}


def _of_the_state(before: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys, before and now, on which the state of the optimizer and its number of steps depend."""
    one, other = vars(before.optimizer), vars(config.optimizer)
    values: dict[str, tuple[Any, Any]] = {
        "optimizer": (before.optimizer.name, config.optimizer.name),
        "optimizer._target_": (one.get("target"), other.get("target")),
        # It decides in which order parameters are numbered.
        "optimizer.decay_norm_and_bias": (one.get("decay_norm_and_bias"), other.get("decay_norm_and_bias")),
        "train.global_batch_size": (before.train.global_batch_size, config.train.global_batch_size),
        "model.freeze": (before.model.freeze, config.model.freeze),  # and this, which the optimizer has
        "model.freeze_epochs": (before.model.freeze_epochs, config.model.freeze_epochs),
        "data.batch_by": (before.data.batch_by, config.data.batch_by),  # what that number counts
    }
    parts, others = _parts(one), _parts(other)
    if parts != others:
        values["optimizer.groups"] = one["groups"], other["groups"]
        values["optimizer.layer_decay"] = one["layer_decay"], other["layer_decay"]
    precisions = before.tuning.precision, config.tuning.precision
    if "fp16" in precisions:  # only fp16 has the state of a GradScaler
        values["tuning.precision"] = precisions
    return values


def _parts(optimizer: dict[str, Any]) -> Any:
    """What the groups of an optimizer consist of; their arguments may change."""
    decays = optimizer["layer_decay"] is not None
    return decays, [(group.get("match"), decays and "lr" in group) for group in optimizer["groups"]]


def _differences(values: dict[str, tuple[Any, Any]], where: str, instead: str) -> list[str]:
    """A line for each key whose value differs from that of the run that is resumed. values: before and now."""
    differing = {  # a manifest is JSON: the keys of its mappings are texts
        key: pair for key, pair in values.items() if pair[0] != pair[1] and json.dumps(pair[0]) != json.dumps(pair[1])
    }
    # Another option of a group has other keys: that is one mistake, not one for each of them.
    groups = tuple(f"{key}." for key in differing if "." not in key)
    return [
        f"{key}={shown(now)}: the run in {where} has {key}={shown(then)}; use that, or {instead}"
        for key, (then, now) in differing.items()
        if not key.startswith(groups)
    ]


def _same_run(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """A run directory that is given again resumes its run: what defines that run must not change."""
    held = Path(str(config.run_dir))
    if config.mode == "doctor":  # it resumes no run, and examines the disk itself
        return []
    if not asked.run_dir or not places(held):
        return []
    if config.mode == "evaluate":
        return [
            f"run_dir={config.run_dir}: holds a training run; leave run_dir out, or name another for the evaluation"
        ]
    before = held_run(config)
    if before is None:
        return []
    values = {"seed": (before.seed, config.seed), **_of_the_state(before, config)}
    if any(isinstance(one.strategy, OrderedConfig) for one in (before, config)):  # else its bits would not be its own
        values["strategy"] = (before.strategy.name, config.strategy.name)
        shards = [vars(one.strategy).get("virtual_shards") for one in (before, config)]
        values["strategy.virtual_shards"] = (shards[0], shards[1])
    for section in ("model", "data"):
        one, other = (_sample_keys(getattr(c, section)) for c in (before, config))
        for name in dict.fromkeys((*one, *other)):
            key = section if name == "name" else f"{section}.{name}"
            values[key] = (one.get(name), other.get(name))
    return _differences(values, f"run_dir={config.run_dir}", "another run_dir")


def held_run(config: Config) -> Config | None:
    """The config of the run in the run directory, if this one will resume it: that of its newest checkpoint.
    config.yaml is what was asked for last, and may have been changed since."""
    resumes = config.mode == "train" and config.checkpoint.resume != "never"
    before = manifest_config(Path(str(config.run_dir))) if resumes else {}
    return bind_frozen(before)[0] if before else None


def changed(before: Config, config: Config) -> list[str]:
    """What a resumed run does differently, of the keys that may change: `optimizer.lr=0.05 (was 0.3)`."""
    found = []
    for section in ("train", "task", "optimizer", "schedule"):
        one, other = (_values_of(getattr(c, section)) for c in (before, config))
        for name in dict.fromkeys((*one, *other)):
            if one.get(name) != other.get(name) and name in other:
                key = section if name == "name" else f"{section}.{name}"
                was = f" (was {shown(one[name])})" if name in one else ""
                found.append(f"{key}={shown(other[name])}{was}")
    return found


def _values_of(section: Any) -> dict[str, Any]:
    """The keys of a section; those of a section within it by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in vars(section).items():
        inner = {f"{name}.{key}": one for key, one in vars(value).items()} if dataclasses.is_dataclass(value) else {}
        found |= inner or {name: value}
    return found


def _sample_keys(section: Any) -> dict[str, Any]:
    """The keys of the model or the data that change a sample."""
    return {
        name: value for name, value in vars(section).items() if name not in ("root", "path", "download", "placement")
    }


def _code(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """Whether the code that `_target_` and `hooks` name may be loaded. Nothing is imported to find out."""
    problems = []
    for section, custom in _own_code(config).items():
        inner = next((path for path, _ in leaves(custom.values()) if "_target_" in path.split(".")), None)
        if inner:
            also = "; transforms stand in data.transform and data.test_transform" if section == "data" else ""
            problems.append(f"{section}.{inner}: arguments are plain values; only {section}._target_ names code{also}")
        if not custom.target and "target" in custom.arguments:
            typed = shown(custom.arguments["target"])
            problems.append(f"{section}.target={typed}: the key is {section}._target_; use {section}._target_={typed}")
            continue
        problems += code_problems(section, custom, config.trusted_modules)
    for path in config.hooks:
        found = f"hooks=[{path}]"
        problems += _not_loadable(found, path, TRUSTED_HOOKS, config.trusted_modules) or _no_hook(found, path)
    return problems


def code_problems(section: str, options: Any, trusted_modules: Sequence[str]) -> list[str]:
    """Why the code that a section names cannot be loaded. options: those of the section, a class of ours or yours."""
    code = options.code() if isinstance(options, CustomConfig) else []
    named = [(f"{section}.{key}={shown(path or None)}", path) for key, path in code]
    trusted = trusted_for(section)
    return [problem for found, path in named for problem in _not_loadable(found, path, trusted, list(trusted_modules))]


def _own_code(config: Config) -> dict[str, CustomConfig]:
    """The user's own classes and functions, by the key that holds their `_target_`."""
    sections = {section: getattr(config, section) for section in ("model", "task", "data", "optimizer")}
    own = {section: custom for section, custom in sections.items() if isinstance(custom, CustomConfig)}
    missing = () if _has_metrics() else (f"{metrics.LIBRARY}.",)  # said once, by `_further_metrics`
    return own | {one.key: one.custom for one in metrics.further(config) if not one.custom.target.startswith(missing)}


def trusted_for(section: str) -> tuple[str, ...]:
    """The modules whose code a `_target_` may name, wherever it comes from."""
    return TRUSTED_METRICS if section.startswith("metrics[") else TRUSTED_MODULES


def _not_loadable(found: str, path: str, trusted: tuple[str, ...], trusted_modules: list[str]) -> list[str]:
    """Why a dotted path cannot be loaded. found: its key and value, for the message."""
    package = path.partition(".")[0]
    if not re.fullmatch(_DOTTED_PATH, path):
        return [f"{found}: must be a dotted path, package.Name"]
    if not is_trusted(path, [*trusted, *trusted_modules]):
        return [
            f"{found}: loads code from outside {', '.join(trusted)}; if you trust it, add trusted_modules=[{package}]"
        ]
    spec = importlib.util.find_spec(package)
    if spec is None:
        return [f"{found}: no module {package} in {Path.cwd()} or installed; for code elsewhere set PYTHONPATH"]
    here = [place for place in (Path(package), Path(f"{package}.py")) if place.is_file() or any(place.glob("*.py"))]
    origin = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    if here and not is_trusted(path, trusted) and not Path(origin).resolve().is_relative_to(Path.cwd()):
        return [f"{found}: {here[0]} in this folder is hidden by {origin}; rename it, or set PYTHONPATH=."]
    return []


def _no_hook(found: str, path: str) -> list[str]:
    """Why a dotted path names no hook, by the source of its module. What that does not show (names that are imported,
    base classes, decorators) `user_code.build_hook` finds out in the workers. found: as above."""
    package, *inner, name = path.split(".")
    spec = importlib.util.find_spec(package)  # of a module inside, it would import the packages above
    places = [Path(root, *inner) for root in (spec and spec.submodule_search_locations) or []]
    files = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py"))]
    files = files if inner else [Path((spec and spec.origin) or "")]
    try:
        source = ast.parse(next((file for file in files if file.is_file()), Path()).read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # none, or the worker shows where it is wrong
        return []
    what = ""
    match [statement for statement in source if name in _bound([statement])][-1:]:
        case [ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Assign(value=ast.Lambda())]:
            what = "a function"
        case [ast.Assign(value=ast.Constant() | ast.List() | ast.Tuple() | ast.Dict())]:
            what = "a value"
        case [ast.ClassDef(bases=[], keywords=[], decorator_list=[], body=body)]:
            what = "" if {"__enter__", "__exit__"} <= _bound(body) else "a class without them"
    return [f"{found}: {HOOK_RULE}, and is {what}"] if what else []


def _bound(statements: Sequence[ast.stmt]) -> set[str]:
    """The names that definitions and assignments bind."""
    targets = [target for statement in statements for target in (statement, *getattr(statement, "targets", ()))]
    return {getattr(target, "name", getattr(target, "id", "")) for target in targets}


def package_of(path: str) -> list[str]:
    """The top package of a dotted path that lies outside of the modules trusted by default; none if it lies inside."""
    well_formed = re.fullmatch(_DOTTED_PATH, path)
    return [path.partition(".")[0]] if well_formed and not is_trusted(path, TRUSTED_MODULES) else []


def is_trusted(path: str, modules: Sequence[str]) -> bool:
    """Whether a dotted path lies inside one of the modules."""
    return any(f"{path}.".startswith(f"{module}.") for module in modules)


def _secrets(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """The config is written to files, terminals and checkpoints, so secrets must stay in the environment."""
    return [
        f"{section}.{path}=(hidden): the config is written to files, so it must hold no secret; put it into the "
        f"environment: {section}.{path}='${{oc.env:NAME}}'"
        for section, custom in _own_code(config).items()
        for path, value in leaves(custom.all_values())
        if is_secret(path) and isinstance(value, str) and value and not re.fullmatch(r"\$\{oc\.env:\w+\}", value)
    ]


def _tracker(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """Whether the library of each tracker is installed. It is not imported, which would take over a second."""
    return [
        f"tracker.{name}=true: {name} is not installed; run {sys.executable} -m pip install '.[{name}]'"
        for name in TRACKERS
        # A folder of that name, as wandb and mlflow make them, would be found too: as a package without a file.
        if getattr(config.tracker, name) and ((spec := importlib.util.find_spec(name)) is None or spec.origin is None)
    ]


def _further_metrics(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    if not config.metrics or _has_metrics():
        return []
    return [f"metrics=[...]: {metrics.LIBRARY} is not installed; run {sys.executable} -m pip install '.[metrics]'"]


def _has_metrics() -> bool:
    """Whether the library of `metrics` is installed. It is not imported: it imports torch."""
    return bool((spec := importlib.util.find_spec(metrics.LIBRARY)) and spec.origin)


def _run_dir(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """Checks without writing; `freeze` tries, and fails with the same message."""
    if not re.fullmatch(r"[\w][\w .+=-]*", config.name):
        return [f"name={config.name}: must be usable as the name of a folder: letters, digits, and . _ + = -"]
    run_dir = Path(str(config.run_dir)).absolute()
    if config.mode == "doctor":  # it tries to write, on every host
        return []
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not existing.is_dir():
        return [unwritable(config.run_dir, f"{existing} is not a folder")]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [unwritable(config.run_dir, f"no permission to write in {existing}")]
    return []


def unwritable(run_dir: str | None, reason: str) -> str:
    """The message of a run directory that cannot be written."""
    return f"run_dir={run_dir}: cannot be written ({reason}); name a folder that can"


CHECKS = (_model, _data, _checkpoint, _same_run, _code, _secrets, _tracker, _further_metrics, _run_dir)
