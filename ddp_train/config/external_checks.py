"""Checks of what a config refers to: data, checkpoints, the run directory. Nothing is imported or
written."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.util
import json
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

from ddp_train.checkpoints.layout import MANIFEST, places, read_manifest
from ddp_train.config import code_checks
from ddp_train.config.code_checks import TRUSTED_TRACKERS, is_trusted
from ddp_train.config.data_checks import missing_data, wrong_own_data
from ddp_train.config.migrate import bind_frozen, migrated
from ddp_train.config.user_code import missing_package, tracker_class
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, DiskFullError
from ddp_train.hardware import Hardware
from ddp_train.models.config import TorchvisionConfig
from ddp_train.models.gpt.config import GptConfig
from ddp_train.options.custom import CustomConfig, CustomDataConfig, trackers_of
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import SECTIONS, Config
from ddp_train.parallel.ordered.config import OrderedConfig
from ddp_train.text import did_you_mean, shown

LEAST_OPEN_FILES = 64
"""With 24 a process hung as it began, with 64 it trains."""
OF_THE_DIGITS = {
    "strategy": (
        "name",
        "comm_hook",
        "powersgd_rank",
        "sync_bn",
        "bucket_cap_mb",
        "bucket_cap_mb_list",
    ),
    "tuning": (
        "precision",
        "tf32",
        "channels_last",
        "cudnn_benchmark",
        "compile",
        "compile_mode",
        "buckets",
        "triton_kernels",
        "conv_sums",
        "optimizer",
    ),
}
"""Keys of these sections that change the digits of a number."""


def _model(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    model = config.model
    shape = config.data.image_shape()
    if model.takes_images and config.data.is_regression:
        return [
            f"model={model.name}: needs images, and data={config.data.name} is a table; use"
            " model=linear_regression or mlp"
        ]
    tokens = config.data.task == "language_model"
    if tokens and model.takes_tokens is False:
        return [
            f"model={model.name}: takes no tokens, and data={config.data.name} has nothing else;"
            " use model=gpt"
        ]
    if model.takes_tokens and not tokens and not isinstance(config.data, CustomConfig):
        return [
            f"model={model.name}: needs tokens, and data={config.data.name} has none; use data=text"
        ]
    if isinstance(model, GptConfig) and model.width % model.heads:
        several = model.width // model.heads * model.heads or model.heads
        return [
            f"model.width={model.width}: must be a multiple of model.heads={model.heads}; use"
            f" model.width={several}"
        ]
    if shape and shape[1] < model.smallest_side:
        return [
            f"data.image_size={shape[1]}: model={model.name} halves its images; use at least"
            f" {model.smallest_side}"
        ]
    if shape and model.channels_taken and shape[0] not in model.channels_taken:
        allowed = " or ".join(map(str, model.channels_taken))
        return [
            f"data.channels={shape[0]}: model={model.name} takes {allowed}; use data.channels=3"
        ]
    if isinstance(model, TorchvisionConfig) and model.arch not in (
        names := torchvision_classifiers()
    ):
        return [
            f"model.arch={model.arch}: torchvision has no classifier of that"
            f" name{did_you_mean(model.arch, names)}"
        ]
    return []


def torchvision_classifiers() -> list[str]:
    """The classifiers of the installed torchvision, read from its source files: importing it takes
    over a second."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return []
    sources = Path(spec.submodule_search_locations[0], "models").glob("*.py")
    found = (
        re.findall(r"^@register_model\(.*?\)\n(?:@.*\n)*def (\w+)\(", path.read_text(), re.M)
        for path in sources
    )
    return sorted(name for names in found for name in names)


def _data(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    if config.mode == "export":  # it reads no data
        return []
    own = wrong_own_data(config.data) if isinstance(config.data, CustomDataConfig) else []
    # the doctor asks on every host
    if config.mode == "doctor":
        return own
    return own + missing_data(config)


def _checkpoint(
    asked: Config, config: Config, hardware: Hardware, world: World | None
) -> list[str]:
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        return [
            f"checkpoint.resume={resume}: no such folder; use auto, never, or the path of a run or"
            " a checkpoint"
        ]
    if config.uses_trained and resume in ("auto", "never"):
        return [
            f"mode={config.mode}: needs a checkpoint, checkpoint.resume={resume} names none; add"
            " checkpoint.resume=PATH"
        ]
    if resume in ("auto", "never"):
        if config.checkpoint.which != "best":
            return []
        return [
            "checkpoint.which=best: a run resumes from its last checkpoint,"
            f" checkpoint.resume={resume}; to start from the best of another run use"
            " checkpoint.resume=RUN and another run_dir"
        ]
    if not _with_manifests(Path(resume)):
        return [
            f"checkpoint.resume={resume}: holds no checkpoint; use the path of a run or a"
            " checkpoint"
        ]
    before = manifest_config(Path(resume))
    if config.uses_trained or not before:
        return []
    then = bind_frozen(before)[0]
    values = _of_the_state(then, config)
    if (
        config.data.validation and then.data.name == config.data.name
    ):  # else what it trained with would validate
        values["seed"] = then.seed, config.seed
        values["data.validation"] = then.data.validation, config.data.validation
    return _differences(values, f"checkpoint.resume={resume}", "checkpoint.resume=never")


def _with_manifests(resume: Path) -> list[Path]:
    """A checkpoint, or all checkpoints of a run, the newest first."""
    with contextlib.suppress(OSError):  # a name that is too long, which `check_rules` refuses later
        return [place for place in (resume, *places(resume)) if (place / MANIFEST).is_file()]
    return []


def manifest_config(resume: Path) -> dict[str, Any]:
    """The config of a checkpoint, or of the newest in a run, as plain values; {} if no manifest can
    be trusted."""
    for path in _with_manifests(resume):
        with contextlib.suppress(
            OSError, ValueError
        ):  # corrupt: the worker skips it, with a warning
            if config := read_manifest(path).get("config"):
                sections = {**OPTIONS, **SECTIONS}
                return {
                    k: v
                    for k, v in migrated(config).items()
                    if isinstance(v, dict) or k not in sections
                }
    return {}


def _of_the_state(before: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys, before and now, on which the state of the optimizer and its number of steps depend."""
    one = vars(before.optimizer)
    other = vars(config.optimizer)
    values: dict[str, tuple[Any, Any]] = {
        "optimizer": (before.optimizer.name, config.optimizer.name),
        "optimizer._target_": (one.get("target"), other.get("target")),
        # It decides in which order parameters are numbered.
        "optimizer.decay_norm_and_bias": (
            one.get("decay_norm_and_bias"),
            other.get("decay_norm_and_bias"),
        ),
        "train.global_batch_size": (before.train.global_batch_size, config.train.global_batch_size),
        "model.freeze": (
            before.model.freeze,
            config.model.freeze,
        ),  # and this, which the optimizer has
        "model.freeze_epochs": (before.model.freeze_epochs, config.model.freeze_epochs),
        "data.batch_by": (before.data.batch_by, config.data.batch_by),  # what that number counts
    }
    parts = _parts(one)
    others = _parts(other)
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
    """A line for each key whose value differs from that of the run that is resumed. values: before
    and now."""
    differing = {  # a manifest is JSON: the keys of its mappings are texts
        key: pair
        for key, pair in values.items()
        if pair[0] != pair[1] and json.dumps(pair[0]) != json.dumps(pair[1])
    }
    # Another option of a group has other keys: that is one mistake, not one for each of them.
    groups = tuple(f"{key}." for key in differing if "." not in key)
    return [
        f"{key}={shown(now)}: the run in {where} has {key}={shown(then)}; use that, or {instead}"
        for key, (then, now) in differing.items()
        if not key.startswith(groups)
    ]


def _same_run(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """A run directory that is given again resumes its run: what defines that run must not
    change."""
    held = Path(str(config.run_dir))
    if config.mode == "doctor":  # it resumes no run, and examines the disk itself
        return []
    if not asked.run_dir or not places(held):
        return []
    if config.uses_trained:
        return [
            f"run_dir={config.run_dir}: holds a training run; leave run_dir out, or name another"
            f" for mode={config.mode}"
        ]
    before = held_run(config)
    if before is None:
        return []
    return of_another_run(before, config, f"run_dir={config.run_dir}", "another run_dir")


def of_another_run(before: Config, config: Config, where: str, instead: str) -> list[str]:
    """A problem for each key that defines a run and differs from that of the run which is in
    `where`."""
    values = {"seed": (before.seed, config.seed), **_of_the_state(before, config)}
    if any(
        isinstance(one.strategy, OrderedConfig) for one in (before, config)
    ):  # else its bits would not be its own
        values["strategy"] = (before.strategy.name, config.strategy.name)
        shards = [vars(one.strategy).get("virtual_shards") for one in (before, config)]
        values["strategy.virtual_shards"] = (shards[0], shards[1])
    for section in ("model", "data"):
        one, other = (_sample_keys(getattr(c, section)) for c in (before, config))
        for name in dict.fromkeys((*one, *other)):
            key = section if name == "name" else f"{section}.{name}"
            values[key] = (one.get(name), other.get(name))
    return _differences(values, where, instead)


def held_run(config: Config) -> Config | None:
    """The config of the run in the run directory, if this one will resume it: that of its newest
    checkpoint. config.yaml is what was asked for last, and may have been changed since."""
    resumes = config.mode == "train" and config.checkpoint.resume != "never"
    before = manifest_config(Path(str(config.run_dir))) if resumes else {}
    return bind_frozen(before)[0] if before else None


def changed(before: Config, config: Config) -> list[str]:
    """What a resumed run does differently, of the keys that may change: `optimizer.lr=0.05 (was
    0.3)`."""
    found = []
    for section in ("train", "task", "optimizer", "schedule", *OF_THE_DIGITS):
        one, other = (_values_of(getattr(c, section)) for c in (before, config))
        for name in OF_THE_DIGITS.get(section) or dict.fromkeys((*one, *other)):
            if one.get(name) != other.get(name) and name in other:
                key = section if name == "name" else f"{section}.{name}"
                was = f" (was {shown(one[name])})" if name in one else ""
                found.append(f"{key}={shown(other[name])}{was}")
    return found


def _values_of(section: Any) -> dict[str, Any]:
    """The keys of a section; those of a section within it by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in vars(section).items():
        if dataclasses.is_dataclass(value):
            inner = {f"{name}.{key}": one for key, one in vars(value).items()}
        else:
            inner = {}
        found |= inner or {name: value}
    return found


def _sample_keys(section: Any) -> dict[str, Any]:
    """The keys of the model or the data that change a sample."""
    return {
        name: value
        for name, value in vars(section).items()
        if name not in ("root", "path", "download", "placement")
    }


def _mirror(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """Whether fsspec knows the kind of URL, and its package is there. The store itself is asked
    when the run begins."""
    url = config.checkpoint.mirror
    if url is None:
        return []
    import fsspec

    kind = url.partition("://")[0]
    if "://" not in url:
        return [
            f"checkpoint.mirror={url}: must be a URL; use s3://BUCKET/RUN, or"
            f" file://{Path(url).absolute()}"
        ]
    try:
        fsspec.get_filesystem_class(kind)
    except ValueError:
        guess = did_you_mean(kind, sorted(fsspec.available_protocols()))
        return [f"checkpoint.mirror={url}: fsspec knows no {kind}://{guess}"]
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or kind
        return [
            f"checkpoint.mirror={url}: needs the package {package}; run {sys.executable} -m pip"
            f" install {package}"
        ]
    if kind == "memory":
        return [
            f"checkpoint.mirror={url}: ends with the process; name a folder on another disk,"
            " file:///..."
        ]
    place = Path(fsspec.core.strip_protocol(url)).resolve()
    if kind in ("file", "local") and place.is_relative_to(Path(str(config.run_dir)).resolve()):
        return [
            f"checkpoint.mirror={url}: lies in the run directory; name a folder on another disk"
        ]
    return []


def _tracker(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """Problems with packages of our trackers. Those of the user's are checked in rank 0."""
    problems = []
    for name, custom in trackers_of(config.tracker.classes).items():
        if not is_trusted(custom.target, TRUSTED_TRACKERS):
            continue
        try:
            missing = missing_package(tracker_class(name, custom))
        except ConfigError as error:
            problems += error.problems
            continue
        if missing:
            install = f"{sys.executable} -m pip install '.[{missing}]'"
            problems.append(f"tracker={name}: {missing} is not installed; run {install}")
    return problems


def _run_dir(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """Checks without writing; `freeze` tries, and fails with the same message."""
    if not re.fullmatch(r"[\w][\w .+=-]*", config.name):
        return [
            f"name={config.name}: must be usable as the name of a folder: letters, digits, and . _"
            " + = -"
        ]
    run_dir = Path(str(config.run_dir)).absolute()
    if config.mode == "doctor":  # it tries to write, on every host
        return []
    if what := _not_of_its_own(run_dir.resolve()):
        remedy = f"name one of its own, run_dir={run_dir / 'runs/NAME'}"
        return [f"run_dir={config.run_dir}: a run would put its files into the {what}; {remedy}"]
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not existing.is_dir():
        return [unwritable(config.run_dir, f"{existing} is not a folder")]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [unwritable(config.run_dir, f"no permission to write in {existing}")]
    return []


def _not_of_its_own(run_dir: Path) -> str:
    """Which folder with other files a run directory is; "" for any other. Other folders may hold
    some: lost+found of a mount, logs of a batch system."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  Path's raises where there is none
    folders = {Path("/"): "root folder", home: "home folder", Path.cwd(): "working folder"}
    is_run = not run_dir.is_dir() or any(
        (run_dir / name).exists() for name in ("config.yaml", "checkpoints")
    )
    if is_run or run_dir not in folders or not any(run_dir.iterdir()):
        return ""
    return folders[run_dir]


def _open_files(
    asked: Config, config: Config, hardware: Hardware, world: World | None
) -> list[str]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < LEAST_OPEN_FILES:
        return [
            f"a process may open {soft} files (ulimit -n), too few to connect; run `ulimit -n 1024`"
            " first"
        ]
    return []


def unwritable(run_dir: str | None, reason: str) -> str:
    """The message of a run directory that cannot be written."""
    return f"run_dir={run_dir}: cannot be written ({reason}); name a folder that can"


def unwritten(run_dir: str | Path | None, error: OSError) -> ConfigError:
    """To be raised where a run directory could not be written."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some space, and start the same command again"
        return DiskFullError([f"run_dir={run_dir}: cannot be written ({reason}); {remedy}"])
    return ConfigError([unwritable(str(run_dir), reason)])


CHECKS = (
    _model,
    _data,
    _checkpoint,
    _same_run,
    *code_checks.CHECKS,
    _mirror,
    _tracker,
    _run_dir,
    _open_files,
)
