"""What a config names outside itself: data, checkpoints, code, the run directory. Nothing is imported or written."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from ddp_train.config.bind import bind
from ddp_train.config.hardware import Hardware
from ddp_train.config.schema import TRACKERS, Config, CustomConfig
from ddp_train.config.values import is_secret, leaves
from ddp_train.distributed.world import World
from ddp_train.text import did_you_mean, shown

TRUSTED_MODULES = (
    "ddp_train.models",
    "ddp_train.optim",
    "torch.nn",
    "torch.optim",
    "torchvision.datasets",
    "torchvision.models",
)

_IDX = [
    f"raw/{name}-ubyte" for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
]
TORCHVISION_FILES = {
    "mnist": [f"MNIST/{name}" for name in _IDX],
    "fashion_mnist": [f"FashionMNIST/{name}" for name in _IDX],
    "cifar10": [f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")],
}
"""The files that torchvision looks for, under data.root."""


def _model(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    model = config.model
    if config.data.name == "linear_regression" and model.name in ("cnn", "torchvision"):
        return [
            f"model={model.name}: needs images, data=linear_regression is a table; use model=linear_regression or mlp"
        ]
    side, channels = getattr(config.data, "image_size", 8), getattr(config.data, "channels", 3)
    if model.name == "cnn" and side < 2:
        return [f"data.image_size={side}: model=cnn halves its images; use at least 2"]
    if model.name == "torchvision" and channels not in (1, 3):
        return [f"data.channels={channels}: torchvision's classifiers take 1 or 3; use data.channels=3"]
    if model.name == "torchvision":
        names = torchvision_classifiers()
        if model.arch not in names:
            return [
                f"model.arch={model.arch}: torchvision has no classifier of that name{did_you_mean(model.arch, names)}"
            ]
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
    return [] if config.mode == "doctor" else missing_data(config)  # the doctor asks on every host


def missing_data(config: Config) -> list[str]:
    """What this host lacks of the data set, or cannot do with it."""
    data = config.data
    if data.name in TORCHVISION_FILES and not data.download:
        missing = [path for path in TORCHVISION_FILES[data.name] if not Path(data.root, path).is_file()]
        if missing:
            packed = Path(data.root, missing[0] + ".gz")
            remedy = f"unpack it: gunzip -k {packed.parent}/*.gz" if packed.is_file() else "add data.download=true"
            return [
                f"data.root={data.root}: {Path(data.root, missing[0])} is missing; {remedy}, or name the folder that "
                f"holds {data.name}"
            ]
    if data.name in ("mnist", "fashion_mnist"):
        cut = [path for path in TORCHVISION_FILES[data.name] if _is_cut(Path(data.root, path))]
        if cut:
            path = Path(data.root, cut[0])
            return [f"data.root={data.root}: {path} is truncated; remove it, and fetch it with data.download=true"]
    if data.name == "image_folder":
        if data.decode == "gpu" and config.device == "cpu":
            return ["data.decode=gpu: needs a GPU; use data.decode=threads"]
        for split in ("train", "val"):
            folder = Path(data.root, split)
            if not folder.is_dir() or not any(entry.is_dir() for entry in folder.iterdir()):
                return [f"data.root={data.root}: {folder} must be a folder with one sub-folder per class"]
    return []


def _is_cut(path: Path) -> bool:
    """Whether an IDX file is shorter than its header says: two zeros, type, dimensions, sizes as uint32, bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        header = file.read(4)
        sizes = file.read(4 * header[3]) if len(header) == 4 else b""
    if len(header) < 4 or len(sizes) < 4 * header[3]:
        return True
    numbers = [int.from_bytes(sizes[at : at + 4]) for at in range(0, len(sizes), 4)]
    return path.stat().st_size < 4 + len(sizes) + math.prod(numbers)


def _checkpoint(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        return [f"checkpoint.resume={resume}: no such folder; use auto, never, or the path of a run or a checkpoint"]
    if config.mode == "evaluate" and resume in ("auto", "never"):
        return [f"mode=evaluate: needs a checkpoint, checkpoint.resume={resume} names none; add checkpoint.resume=PATH"]
    if resume in ("auto", "never"):
        return []
    if not _manifests(Path(resume)):
        return [f"checkpoint.resume={resume}: holds no checkpoint; use the path of a run or a checkpoint"]
    before = manifest_config(Path(resume))
    if config.mode == "evaluate" or not before:
        return []
    values = _of_the_state(bind(before)[0], config)
    return _differences(values, f"checkpoint.resume={resume}", "checkpoint.resume=never")


def _manifests(resume: Path) -> list[Path]:
    """The manifests of a checkpoint, or of all checkpoints of a run, the newest first."""
    places = (resume, *sorted((resume / "checkpoints").glob("step_????????"), reverse=True))
    return [place / "manifest.json" for place in places if (place / "manifest.json").is_file()]


def manifest_config(resume: Path) -> dict[str, Any]:
    """The config, as plain values, that a checkpoint, or the newest of a run, was trained with; {} if none tells."""
    for path in _manifests(resume):
        try:
            config = json.loads(path.read_text())["config"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # corrupt: the worker passes over it, with a warning
        if isinstance(config, dict):
            return config
    return {}


def _of_the_state(before: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys, before and now, that give the state of the optimizer and the count of its steps their meaning."""
    targets = [getattr(c.optimizer, "target", None) for c in (before, config)]
    groups = [getattr(c.optimizer, "decay_norm_and_bias", None) for c in (before, config)]
    values: dict[str, tuple[Any, Any]] = {
        "optimizer": (before.optimizer.name, config.optimizer.name),
        "optimizer._target_": (targets[0], targets[1]),
        "optimizer.decay_norm_and_bias": (groups[0], groups[1]),  # the order in which parameters are numbered
        "train.global_batch_size": (before.train.global_batch_size, config.train.global_batch_size),
    }
    precisions = before.tuning.precision, config.tuning.precision
    if "fp16" in precisions:  # only fp16 has the state of a GradScaler
        values["tuning.precision"] = precisions
    return values


def _differences(values: dict[str, tuple[Any, Any]], where: str, instead: str) -> list[str]:
    """A line for each key whose value is not that of the run that is continued. values: before and now."""
    differing = {key: pair for key, pair in values.items() if pair[0] != pair[1]}
    # Another option of a group has other keys: that is one mistake, not one for each of them.
    groups = tuple(f"{key}." for key in differing if "." not in key)
    return [
        f"{key}={shown(now)}: the run in {where} has {key}={shown(then)}; use that, or {instead}"
        for key, (then, now) in differing.items()
        if not key.startswith(groups)
    ]


def _same_run(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """A run directory that is given again goes on with the run it holds: what defines that run must not change."""
    held = Path(str(config.run_dir))
    if config.mode == "doctor":  # it goes on with no run, and finds out by itself whether that disk answers
        return []
    if not asked.run_dir or not any((held / "checkpoints").glob("step_*")) or not (held / "config.yaml").is_file():
        return []
    if config.mode == "evaluate":
        return [
            f"run_dir={config.run_dir}: holds a training run; leave run_dir out, or name another for the evaluation"
        ]
    before = held_run(config)
    if before is None:
        return []
    values = {"seed": (before.seed, config.seed), **_of_the_state(before, config)}
    for name in ("reduction", "virtual_shards"):
        values[f"train.{name}"] = (getattr(before.train, name), getattr(config.train, name))
    for section in ("model", "data"):
        one, other = (_same_words(getattr(c, section)) for c in (before, config))
        for name in dict.fromkeys((*one, *other)):
            key = section if name == "name" else f"{section}.{name}"
            values[key] = (one.get(name), other.get(name))
    return _differences(values, f"run_dir={config.run_dir}", "another run_dir")


def held_run(config: Config) -> Config | None:
    """The config of the run in the run directory, if this one will go on with it."""
    held = Path(str(config.run_dir))
    goes_on = config.mode == "train" and config.checkpoint.resume != "never"
    if not goes_on or not any((held / "checkpoints").glob("step_*")):
        return None
    try:
        return bind(yaml.safe_load((held / "config.yaml").read_text()))[0]
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return None


def changed(before: Config, config: Config) -> list[str]:
    """What a run that goes on does otherwise than before, of what it may: `optimizer.lr=0.05 and not 0.3`."""
    found = []
    for section in ("train", "optimizer", "schedule"):
        one, other = (vars(getattr(c, section)) for c in (before, config))
        for name in dict.fromkeys((*one, *other)):
            if one.get(name) != other.get(name) and name in other:
                key = section if name == "name" else f"{section}.{name}"
                was = f" and not {shown(one[name])}" if name in one else ""
                found.append(f"{key}={shown(other[name])}{was}")
    return found


def _same_words(section: Any) -> dict[str, Any]:
    """The keys of the model or the data, without what changes no sample."""
    values = {**vars(section), "root": "", "download": "", "loader": ""}
    if values.get("decode") == "processes":
        values["decode"] = "threads"  # the same pixels
    return values


def _code(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """Which code `_target_` may load. Nothing is imported to find out."""
    problems = []
    for section in ("model", "data", "optimizer"):
        custom = getattr(config, section)
        if not isinstance(custom, CustomConfig):
            continue
        inner = next((path for path, _ in leaves(custom.arguments) if "_target_" in path.split(".")), None)
        if inner:
            problems.append(f"{section}.{inner}: arguments are plain values; only {section}._target_ names code")
        found, target = f"{section}._target_={shown(custom.target or None)}", custom.target
        if not target and "target" in custom.arguments:
            typed = shown(custom.arguments["target"])
            problems.append(f"{section}.target={typed}: the key is {section}._target_; use {section}._target_={typed}")
        elif not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", target):
            problems.append(f"{found}: must be a dotted path, package.Name")
        elif not is_trusted(target, config.trusted_modules):
            package = target.partition(".")[0]
            problems.append(
                f"{found}: loads code from outside {', '.join(TRUSTED_MODULES)}; if you trust it, add "
                f"trusted_modules=[{package}]"
            )
        elif importlib.util.find_spec(target.partition(".")[0]) is None:
            problems.append(f"{found}: there is no module {target.partition('.')[0]} beside launch.py or installed")
    return problems


def is_trusted(path: str, trusted_modules: list[str]) -> bool:
    """Whether a dotted path lies within what may be loaded."""
    return any(f"{path}.".startswith(f"{module}.") for module in (*TRUSTED_MODULES, *trusted_modules))


def _secrets(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """What is in the config is in files, on terminals and in checkpoints: a secret must stay in the environment."""
    return [
        f"{section}.{path}=(hidden): a secret does not belong into the config, which is written to files; put it into "
        f"the environment: {section}.{path}='${{oc.env:NAME}}'"
        for section in ("model", "data", "optimizer")
        for path, value in leaves(getattr(getattr(config, section), "arguments", {}))
        if is_secret(path) and isinstance(value, str) and value and not re.fullmatch(r"\$\{oc\.env:\w+\}", value)
    ]


def _tracker(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """Whether the library of each tracker is there. It is not imported: that takes a second and more."""
    return [
        f"tracker.{name}=true: {name} is not installed; {sys.executable} -m pip install '.[{name}]'"
        for name in TRACKERS
        # A folder of that name, as wandb and mlflow make them, would be found too: as a package without a file.
        if getattr(config.tracker, name) and ((spec := importlib.util.find_spec(name)) is None or spec.origin is None)
    ]


def _run_dir(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """Asks without writing; `freeze` tries, and fails with the same words."""
    if not re.fullmatch(r"[\w][\w .+=-]*", config.name):
        return [f"name={config.name}: must be usable as a folder's name: letters, digits, and . _ + = -"]
    run_dir = Path(str(config.run_dir)).absolute()
    if config.mode == "doctor":  # it tries, on every host
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


CHECKS = (_model, _data, _checkpoint, _same_run, _code, _secrets, _tracker, _run_dir)
