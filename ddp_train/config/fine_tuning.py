"""Checks of where a model begins and of what of it trains. No file is opened: what needs the model,
workers check."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from ddp_train.checkpoints.layout import MANIFEST, places
from ddp_train.distributed.world import World
from ddp_train.hardware import Hardware
from ddp_train.models.config import TorchvisionConfig
from ddp_train.options.custom import CustomConfig
from ddp_train.options.key import broken_rule
from ddp_train.options.schema import Config
from ddp_train.text import did_you_mean, shown

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""Of files with weights. All but the first are read by torch.load(weights_only=True)."""


def starts_from_nothing(config: Config) -> bool:
    """Whether the model of a run does not come from a checkpoint: only then the weights to begin
    with are needed."""
    resumes = config.checkpoint.resume == "auto" and bool(places(Path(str(config.run_dir))))
    return config.mode == "train" and config.checkpoint.resume in ("auto", "never") and not resumes


def check(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    model = config.model
    problems = []
    weights = model.weights if isinstance(model, TorchvisionConfig) else None
    if model.init_ignore and model.init_from is None and weights is None:
        problems.append(
            f"model.init_ignore={shown(model.init_ignore)}: has an effect only with"
            " model.init_from=PATH"
        )
    if weights is not None and model.init_from is not None:
        problems.append(
            f"model.weights={weights}: contradicts model.init_from={model.init_from}; give one of"
            " them"
        )
    elif weights is not None and weights not in (known := torchvision_weights(model.arch)):
        guess = did_you_mean(weights, known)
        problems.append(
            f"model.weights={weights}: {model.arch} has {', '.join(known) or 'none'}{guess}"
        )
    if model.freeze_epochs is not None and not model.freeze:
        problems.append(
            f"model.freeze_epochs={model.freeze_epochs}: has an effect only with"
            " model.freeze=[GLOB]"
        )
    problems += [
        problem
        for number, group in enumerate(config.optimizer.groups)
        for problem in _wrong_group(config.optimizer, f"optimizer.groups[{number}]", group)
    ]
    decay = config.optimizer.layer_decay
    if (
        decay is not None
        and isinstance(config.optimizer, CustomConfig)
        and "lr" not in config.optimizer.arguments
    ):
        problems.append(
            f"optimizer.layer_decay={decay:g}: needs optimizer.lr, which it multiplies; add it"
        )
    if model.init_from is not None and starts_from_nothing(config):
        problems += _no_weights(model.init_from)
    return problems


def torchvision_weights(arch: str) -> list[str]:
    """The names of the weights that the installed torchvision has for a classifier, read from its
    source files."""
    spec = importlib.util.find_spec("torchvision")
    for file in Path((spec and spec.origin) or "nowhere").parent.glob("models/*.py"):
        source = file.read_text()
        if takes := re.search(
            rf"^def {re.escape(arch)}\([^)]*?weights: Optional\[(\w+)\]", source, re.M
        ):
            inside = re.search(rf"^class {takes[1]}\(.*?\n(.*?)(?=^\S|\Z)", source, re.M | re.S)
            if inside:
                return re.findall(r"^    (\w+) = ", inside[1], re.M)
            return []
    return []


def _wrong_group(optimizer: Any, key: str, group: dict[str, Any]) -> list[str]:
    """What is wrong with a group. Which arguments a class of your own takes, only the worker
    knows."""
    match = group.get("match")
    found = f"{key}={shown(group)}"
    if not isinstance(match, str) or not match:
        return [f"{found}: needs match, a glob over names of parameters; add match: head.*"]
    arguments = {name: value for name, value in group.items() if name != "match"}
    if not arguments:
        return [f"{found}: changes nothing; give it lr: 0.01, or another argument"]
    own = isinstance(optimizer, CustomConfig)
    rules = {f.name: f.metadata for f in fields(optimizer) if f.type in ("float", "float | None")}
    rules.pop("layer_decay", None)
    problems = []
    for name, value in arguments.items():
        if not own and name not in rules:
            known = f"optimizer={optimizer.name} takes {', '.join(rules)} for a group"
            problems.append(
                f"{found}: no argument {name}; {known}{did_you_mean(name, list(rules))}"
            )
        elif isinstance(value, bool) or not isinstance(value, int | float):
            problems.append(f"{key}.{name}={shown(value)}: must be a number")
        elif broken := broken_rule(value, {} if own else rules[name]):
            problems.append(f"{key}.{name}={shown(value)}: {broken}")
    return problems


def _no_weights(init_from: str) -> list[str]:
    """Why a path cannot be what a model begins with."""
    path = Path(init_from)
    found = f"model.init_from={init_from}"
    if path.is_dir():
        if any((place / MANIFEST).is_file() for place in (path, *places(path))):
            return []
        files = sorted(file.name for file in path.iterdir() if file.suffix in SUFFIXES)
        if files:
            remedy = f"name the file: model.init_from={path / files[0]}"
        else:
            remedy = "name a run that has saved one"
        return [f"{found}: holds no checkpoint; {remedy}"]
    if not path.is_file():
        return [f"{found}: no such file or folder; it is looked for in {Path.cwd()}"]
    if path.suffix not in SUFFIXES:
        return [
            f"{found}: must be a run, a checkpoint, or a file that ends with {', '.join(SUFFIXES)}"
        ]
    return []


def notices(config: Config) -> dict[str, bool]:
    """Keys that have no effect here, and whether that is so."""
    model = config.model
    resume = config.checkpoint.resume
    return {
        f"model.init_from={model.init_from} has no effect:"
        f" the weights are those of checkpoint.resume={resume}": (
            model.init_from is not None
            and config.mode == "train"
            and resume not in ("auto", "never")
        ),
        f"model.freeze_epochs={model.freeze_epochs} changes nothing:"
        f" train.epochs={config.train.epochs}": (
            model.freeze_epochs is not None and model.freeze_epochs >= config.train.epochs
        ),
    }
