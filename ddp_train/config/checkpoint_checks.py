"""Checks of what a run resumes from, and of where its checkpoints are copied to."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from ddp_train.checkpoints.layout import places
from ddp_train.config.earlier_runs import EarlierRun, checkpoints_in, run_to_resume
from ddp_train.config.folders import has_no_config
from ddp_train.config.packages import how_to_install
from ddp_train.options.problem import Problem
from ddp_train.options.schema import Config, OptimizerConfig, RequestedRun
from ddp_train.text import did_you_mean, shell_word, shown

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
OF_THE_STATE = (
    "train.global_batch_size",
    # The optimizer has the frozen parameters too.
    "model.freeze",
    "model.freeze_epochs",
    # It says what the batch size counts.
    "data.batch_by",
)
"""Keys of every run that must not change while the state of its optimizer is kept."""
KEEPS_SAMPLES = ("root", "path", "download", "placement")
"""Keys of `data` that do not change a sample."""


def problems(run: RequestedRun) -> Iterator[Problem]:
    yield from _resume(run.config)
    yield from _same_run(run)
    if run.config.checkpoint.mirror is not None:
        yield from _mirror(run.config.checkpoint.mirror, Path(str(run.config.run_dir)))


def _resume(config: Config) -> Iterator[Problem]:
    resume = config.checkpoint.resume
    if resume not in ("auto", "never"):
        yield from _resume_from(Path(resume), config)
    elif config.uses_trained:
        yield Problem(
            f"mode={config.mode}",
            f"needs a checkpoint, and checkpoint.resume={resume} names none",
            "add checkpoint.resume=PATH",
        )
    elif config.checkpoint.which == "best":
        rule = "has no effect with checkpoint.resume=never"
        if resume == "auto":
            rule = "with checkpoint.resume=auto a run resumes from its last checkpoint"
        yield Problem(
            "checkpoint.which=best",
            rule,
            "to start from the best checkpoint of a run, use checkpoint.resume=RUN and another"
            " run_dir",
        )


def _resume_from(path: Path, config: Config) -> Iterator[Problem]:
    """Problems of `checkpoint.resume=PATH`, a run or a checkpoint."""
    found = f"checkpoint.resume={config.checkpoint.resume}"
    if not path.is_dir():
        yield Problem(
            found,
            "no such folder",
            "use checkpoint.resume=auto, never, or the path of a run or a checkpoint",
        )
    elif not checkpoints_in(path):
        yield Problem(
            found,
            "holds no checkpoint",
            "give the path of a run that has saved one, or of a checkpoint",
        )
    elif has_no_config(checkpoints_in(path)):
        remedy = "evaluate or predict in the script that saved the checkpoint"
        if config.mode == "train":
            typed = shell_word("model.init_from", config.checkpoint.resume)
            remedy = f"to start from its weights, use {typed}"
        rule = "has no config, since ddp_train.session or save_checkpoint wrote it"
        yield Problem(found, rule, remedy)
    elif not config.uses_trained:
        earlier = EarlierRun.of(path)
        if earlier is not None:
            values = _values_to_resume(earlier.config(), config)
            yield from differences(values, found, "checkpoint.resume=never")


def _values_to_resume(before: Config, config: Config) -> Values:
    values = values_of_the_state(before, config)
    if config.data.validation and before.data.name == config.data.name:
        # With other values samples that it trained with would validate.
        values |= _pairs(before, config, "seed", "data.validation")
    return values


def values_of_the_state(before: Config, config: Config) -> Values:
    """The keys on which the state of an optimizer, and its number of steps, depend.

    before: the config of the run that has that state.
    """
    then = vars(before.optimizer)
    now = vars(config.optimizer)
    values: Values = {
        "optimizer": (then["name"], now["name"]),
        "optimizer._target_": (then.get("target"), now.get("target")),
    }
    # It decides in which order parameters are numbered.
    numbering = "decay_norm_and_bias"
    values[f"optimizer.{numbering}"] = (then.get(numbering), now.get(numbering))
    values |= _pairs(before, config, *OF_THE_STATE)
    if _structure_of_groups(before.optimizer) != _structure_of_groups(config.optimizer):
        values |= _pairs(before, config, "optimizer.groups", "optimizer.layer_decay")
    if "fp16" in (before.tuning.precision, config.tuning.precision):
        # Only fp16 has the state of a GradScaler.
        values |= _pairs(before, config, "tuning.precision")
    return values


def _pairs(before: Config, config: Config, *keys: str) -> Values:
    """Keys that both configs have, with both values."""
    return {key: (attrgetter(key)(before), attrgetter(key)(config)) for key in keys}


def _structure_of_groups(optimizer: OptimizerConfig) -> Any:
    """The parts that the groups of an optimizer consist of; their arguments may change."""
    decays = optimizer.layer_decay is not None
    groups = [(group.get("match"), decays and "lr" in group) for group in optimizer.groups]
    return decays, groups


def differences(values: Values, where: str, instead: str) -> Iterator[Problem]:
    """A problem for each key whose value differs from that of the run that is resumed.

    where: the key and value that name that run.
    instead: the override for a new run.
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
                f"use {shlex.quote(f'{name}={shown(then)}')}; for a new run use {instead}",
            )


def _same_run(run: RequestedRun) -> Iterator[Problem]:
    """Problems of a run directory that is given again: what defines its run must not change."""
    config = run.config
    if config.mode == "doctor":  # it resumes no run, and examines the disk itself
        return
    if not run.asked.run_dir or not places(Path(str(config.run_dir))):
        return
    found = f"run_dir={config.run_dir}"
    if config.uses_trained:
        remedy = f"leave run_dir out, or name another for mode={config.mode}"
        yield Problem(found, "holds a training run", remedy)
        return
    before = run_to_resume(config)
    if before is not None:
        elsewhere = shell_word("run_dir", f"{config.run_dir}_new")
        yield from differences_of_runs(before, config, found, elsewhere)


def differences_of_runs(
    before: Config, config: Config, where: str, instead: str
) -> Iterator[Problem]:
    """A problem for each key that defines a run and differs from that of an earlier one.

    where, instead: see `differences`.
    """
    values = _pairs(before, config, "seed") | values_of_the_state(before, config)
    if before.strategy.fixes_bits or config.strategy.fixes_bits:
        # Else its bits would not be those of one strategy.
        values["strategy"] = (before.strategy.name, config.strategy.name)
        values |= _pairs(before, config, "strategy.virtual_shards")
    for section in ("model", "data"):
        then = vars(getattr(before, section))
        now = vars(getattr(config, section))
        for name in dict.fromkeys((*then, *now)):
            if name not in KEEPS_SAMPLES:
                values[_dotted(section, name)] = (then.get(name), now.get(name))
    yield from differences(values, where, instead)


def changed_keys(before: Config, config: Config) -> list[str]:
    """The keys that may change and have, with both values: `optimizer.lr=0.05 (was 0.3)`."""
    changes = []
    for section in ("train", "task", "optimizer", "schedule", *CHANGES_DIGITS):
        then = _values_of(getattr(before, section))
        now = _values_of(getattr(config, section))
        for name in CHANGES_DIGITS.get(section, now):
            if name not in now or then.get(name) == now[name]:
                continue
            change = f"{_dotted(section, name)}={shown(now[name])}"
            if name in then:
                change += f" (was {shown(then[name])})"
            changes.append(change)
    return changes


def stretched_schedule(before: Config, config: Config) -> str:
    """A note that the schedule of a resumed run has another length; "" if it has not.

    A cosine that has ended after two epochs of two stands in the middle of four.
    """
    schedule = config.schedule
    if not schedule.spans_the_run or schedule.name != before.schedule.name:
        return ""
    lengths = {
        "epochs": (before.train.most_epochs, config.train.most_epochs),
        "max_steps": (before.train.max_steps, config.train.max_steps),
    }
    changes = [
        f"train.{name}={shown(now)} (was {shown(then)})"
        for name, (then, now) in lengths.items()
        if then != now
    ]
    if not changes:
        return ""
    return (
        f"{', '.join(changes)}: schedule={schedule.name} is stretched over the new length, so the"
        " learning rate may jump where the run resumes"
    )


def _dotted(section: str, name: str) -> str:
    if name == "name":
        return section
    return f"{section}.{name}"


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
        yield Problem(found, f"fsspec has no file system {kind}://{guess}")
        return
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or kind
        yield Problem(
            found,
            f"needs the package {package}",
            how_to_install(package),
        )
        return
    place = Path(fsspec.core.strip_protocol(url)).resolve()
    if kind == "memory":
        yield Problem(
            found,
            ("its copies are lost when the process ends"),
            "use checkpoint.mirror=file:///FOLDER on another disk",
        )
    elif kind in ("file", "local") and place.is_relative_to(run_dir.resolve()):
        yield Problem(found, "is inside the run directory", "name a folder on another disk")
