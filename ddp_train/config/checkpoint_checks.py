"""Checks of what a run resumes from, and of where its checkpoints are copied to."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddp_train.checkpoints.layout import places
from ddp_train.config.earlier_runs import EarlierRun, checkpoints_in, run_to_resume
from ddp_train.config.folders import has_no_config
from ddp_train.options.problem import Problem
from ddp_train.options.schema import Config, RequestedRun
from ddp_train.text import did_you_mean, shown

Values = dict[str, tuple[Any, Any]]
"""Keys, each with its value before and now."""

CHANGES_DIGITS = {
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
"""Keys, by section, that change the last digits of what is computed."""
KEEPS_SAMPLES = ("root", "path", "download", "placement")
"""Keys of `data` that do not change a sample."""


def problems(run: RequestedRun) -> Iterator[Problem]:
    yield from _resume(run.config)
    yield from _same_run(run)
    if run.config.checkpoint.mirror is not None:
        yield from _mirror(run.config.checkpoint.mirror, Path(str(run.config.run_dir)))


def _resume(config: Config) -> Iterator[Problem]:
    resume = config.checkpoint.resume
    found = f"checkpoint.resume={resume}"
    if resume not in ("auto", "never"):
        if not Path(resume).is_dir():
            yield Problem(
                found,
                "no such folder",
                "use auto, never, or the path of a run or a checkpoint",
            )
        elif not checkpoints_in(Path(resume)):
            yield Problem(found, "holds no checkpoint", "use the path of a run or a checkpoint")
        elif has_no_config(checkpoints_in(Path(resume))):
            remedy = "score or predict in that script"
            if config.mode == "train":
                remedy = f"to begin with its weights, use model.init_from={resume}"
            yield Problem(
                found,
                "a ddp_train.session or save_checkpoint has saved it, without a config",
                remedy,
            )
        elif not config.uses_trained:
            yield from _misfits_of_checkpoint(config)
    elif config.uses_trained:
        yield Problem(
            f"mode={config.mode}",
            f"needs a checkpoint, checkpoint.resume={resume} names none",
            "add checkpoint.resume=PATH",
        )
    elif config.checkpoint.which == "best":
        yield Problem(
            "checkpoint.which=best",
            f"a run resumes from its last checkpoint, checkpoint.resume={resume}",
            "to start from the best of another run use checkpoint.resume=RUN and another run_dir",
        )


def _misfits_of_checkpoint(config: Config) -> Iterator[Problem]:
    """A problem for each key that the checkpoint of `checkpoint.resume=PATH` does not fit.

    None if no config can be read from it.
    """
    named_by = f"checkpoint.resume={config.checkpoint.resume}"
    earlier = EarlierRun.of(Path(config.checkpoint.resume))
    if earlier is None:
        return
    before = earlier.config()
    values = values_of_the_state(before, config)
    if config.data.validation and before.data.name == config.data.name:
        # With other values samples that it trained with would validate.
        values["seed"] = (before.seed, config.seed)
        values["data.validation"] = (before.data.validation, config.data.validation)
    yield from differences(values, named_by, "checkpoint.resume=never")


def values_of_the_state(before: Config, config: Config) -> Values:
    """The keys on which the state of an optimizer, and its number of steps, depend.

    before: the config of the run that has that state.
    """
    then = vars(before.optimizer)
    now = vars(config.optimizer)
    values: Values = {
        "optimizer": (before.optimizer.name, config.optimizer.name),
        "optimizer._target_": (then.get("target"), now.get("target")),
        # These decide in which order parameters are numbered.
        "optimizer.decay_norm_and_bias": (
            then.get("decay_norm_and_bias"),
            now.get("decay_norm_and_bias"),
        ),
        "train.global_batch_size": (before.train.global_batch_size, config.train.global_batch_size),
        # The optimizer has the frozen parameters too.
        "model.freeze": (before.model.freeze, config.model.freeze),
        "model.freeze_epochs": (before.model.freeze_epochs, config.model.freeze_epochs),
        # What that batch size counts.
        "data.batch_by": (before.data.batch_by, config.data.batch_by),
    }
    if _structure_of_groups(then) != _structure_of_groups(now):
        values["optimizer.groups"] = (then["groups"], now["groups"])
        values["optimizer.layer_decay"] = (then["layer_decay"], now["layer_decay"])
    precisions = (before.tuning.precision, config.tuning.precision)
    if "fp16" in precisions:  # only fp16 has the state of a GradScaler
        values["tuning.precision"] = precisions
    return values


def _structure_of_groups(optimizer: dict[str, Any]) -> Any:
    """What the groups of an optimizer consist of; their arguments may change."""
    decays = optimizer["layer_decay"] is not None
    return decays, [(group.get("match"), decays and "lr" in group) for group in optimizer["groups"]]


def differences(values: Values, where: str, instead: str) -> Iterator[Problem]:
    """A problem for each key whose value differs from that of the run that is resumed.

    where: the key and value that name that run.
    instead: what to type for a run of its own.
    """
    differing = {  # a manifest is JSON: the keys of its mappings are texts
        name: (then, now)
        for name, (then, now) in values.items()
        if then != now and json.dumps(then) != json.dumps(now)
    }
    # Another option of a group has other keys: that is one mistake, not one for each of them.
    groups = tuple(f"{name}." for name in differing if "." not in name)
    for name, (then, now) in differing.items():
        if not name.startswith(groups):
            yield Problem(
                f"{name}={shown(now)}",
                f"the run in {where} has {name}={shown(then)}",
                f"use that, or {instead}",
            )


def _same_run(run: RequestedRun) -> Iterator[Problem]:
    """A run directory that is given again resumes its run: what defines it must not change."""
    config = run.config
    if config.mode == "doctor":  # it resumes no run, and examines the disk itself
        return
    if not run.asked.run_dir or not places(Path(str(config.run_dir))):
        return
    if config.uses_trained:
        yield Problem(
            f"run_dir={config.run_dir}",
            "holds a training run",
            f"leave run_dir out, or name another for mode={config.mode}",
        )
        return
    before = run_to_resume(config)
    if before is not None:
        where = f"run_dir={config.run_dir}"
        yield from differences_of_runs(before, config, where, "another run_dir")


def differences_of_runs(
    before: Config, config: Config, where: str, instead: str
) -> Iterator[Problem]:
    """A problem for each key that defines a run and differs from that of an earlier one.

    where, instead: see `differences`.
    """
    values = {"seed": (before.seed, config.seed), **values_of_the_state(before, config)}
    strategies = (before.strategy, config.strategy)
    if any(strategy.fixes_bits for strategy in strategies):  # else its bits would not be its own
        values["strategy"] = (before.strategy.name, config.strategy.name)
        values["strategy.virtual_shards"] = (
            before.strategy.virtual_shards,
            config.strategy.virtual_shards,
        )
    for section in ("model", "data"):
        then = vars(getattr(before, section))
        now = vars(getattr(config, section))
        for name in dict.fromkeys((*then, *now)):
            if name not in KEEPS_SAMPLES:
                values[_dotted(section, name)] = (then.get(name), now.get(name))
    yield from differences(values, where, instead)


def changed(before: Config, config: Config) -> list[str]:
    """The keys that may change and have, with both values: `optimizer.lr=0.05 (was 0.3)`."""
    found = []
    for section in ("train", "task", "optimizer", "schedule", *CHANGES_DIGITS):
        then = _values_of(getattr(before, section))
        now = _values_of(getattr(config, section))
        for name in CHANGES_DIGITS.get(section) or dict.fromkeys((*then, *now)):
            if then.get(name) != now.get(name) and name in now:
                was = f" (was {shown(then[name])})" if name in then else ""
                found.append(f"{_dotted(section, name)}={shown(now[name])}{was}")
    return found


def _dotted(section: str, name: str) -> str:
    return section if name == "name" else f"{section}.{name}"


def _values_of(section: Any) -> dict[str, Any]:
    """The keys of a section; those of a section within it by their dotted names."""
    values: dict[str, Any] = {}
    for name, value in vars(section).items():
        if dataclasses.is_dataclass(value):
            values |= {f"{name}.{inner}": item for inner, item in vars(value).items()}
        else:
            values[name] = value
    return values


def _mirror(url: str, run_dir: Path) -> Iterator[Problem]:
    """Problems of a URL that fsspec finds. The store itself is asked when the run begins."""
    import fsspec

    found = f"checkpoint.mirror={url}"
    kind = url.partition("://")[0]
    if "://" not in url:
        yield Problem(
            found, "must be a URL", f"use s3://BUCKET/RUN, or file://{Path(url).absolute()}"
        )
        return
    try:
        fsspec.get_filesystem_class(kind)
    except ValueError:
        guess = did_you_mean(kind, sorted(fsspec.available_protocols()))
        yield Problem(found, f"fsspec knows no {kind}://{guess}")
        return
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or kind
        yield Problem(
            found,
            f"needs the package {package}",
            f"run {sys.executable} -m pip install {package}",
        )
        return
    place = Path(fsspec.core.strip_protocol(url)).resolve()
    if kind == "memory":
        yield Problem(found, "ends with the process", "name a folder on another disk, file:///...")
    elif kind in ("file", "local") and place.is_relative_to(run_dir.resolve()):
        yield Problem(found, "lies in the run directory", "name a folder on another disk")
