"""Switches that the user set and that have no effect here.

Not errors: the same command runs elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddp_train.config.switches import why_no_buckets
from ddp_train.options.schema import RequestedRun
from ddp_train.text import shown

ON_GPUS_ONLY = (
    "pin_memory",
    "non_blocking",
    "copy_stream",
    "cudnn_benchmark",
    "tf32",
    "cuda_graph",
    "rehearse",
    "triton_kernels",
    "conv_sums",
)
"""Switches under `tuning`."""
OF_ONE_MODE = ("evaluate", "predict", "export", "prove")
"""Sections that the mode of the same name reads."""


def notices(run: RequestedRun) -> list[str]:
    config = run.config
    return [
        *config.strategy.notices(run),
        *config.model.notices(run),
        *config.optimizer.notices(run),
        *config.schedule.notices(run),
        *_of_tuning(run),
        *_of_training(run),
        *_of_checkpoints(run),
        *_of_hosts(run),
    ]


def of_other_modes(given: Mapping[str, Any], mode: str) -> list[str]:
    """A notice for each key of the command line that another mode reads. Presets may have keys of
    several modes.

    given: values by dotted keys.
    """
    notes = []
    for key, value in given.items():
        section = key.partition(".")[0]
        if section in OF_ONE_MODE and section != mode:
            notes.append(f"{key}={shown(value)} has no effect: it is for mode={section}")
    return notes


def _of_tuning(run: RequestedRun) -> Iterator[str]:
    asked = run.asked.tuning
    tuning = run.config.tuning
    for name in ON_GPUS_ONLY:
        if run.config.device == "cpu" and getattr(asked, name) is True:
            yield f"tuning.{name}=true has no effect on CPU"
    if tuning.num_workers == 0 and asked.prefetch_factor != type(tuning)().prefetch_factor:
        yield (
            f"tuning.prefetch_factor={asked.prefetch_factor} has no effect without loader processes"
            " (tuning.num_workers=0)"
        )
    if not tuning.compile and tuning.compile_mode != "default":
        yield f"tuning.compile_mode={tuning.compile_mode} has no effect: tuning.compile=false"
    why_not = why_no_buckets(run.config, asked.buckets)
    if asked.buckets not in ("auto", "default") and why_not:
        yield f"tuning.buckets={asked.buckets} has no effect: {why_not}"


def _of_training(run: RequestedRun) -> Iterator[str]:
    config = run.config
    stopping = config.train.early_stopping
    if stopping.patience is None:
        for found in _changed_keys("train.early_stopping", stopping):
            yield f"{found} has no effect without train.early_stopping.patience"
    if config.hooks and config.uses_trained:
        yield f"hooks={shown(config.hooks)} has no effect: mode={config.mode} does not train"
    if config.tracker.details and "tensorboard" not in config.tracker.classes:
        yield "tracker.details=true has no effect without tracker=tensorboard"
    for found in _changed_keys("sweep", config.sweep):
        yield f"{found} has no effect without -m"


def _changed_keys(section: str, values: Any) -> Iterator[str]:
    """The keys of a section whose values are not the defaults, as overrides."""
    defaults = type(values)()
    for name, value in vars(values).items():
        if value != getattr(defaults, name):
            yield f"{section}.{name}={shown(value)}"


def _of_checkpoints(run: RequestedRun) -> Iterator[str]:
    checkpoint = run.config.checkpoint
    mode = run.config.mode
    names_one = (Path(checkpoint.resume) / "manifest.json").is_file()
    if checkpoint.which != "auto" and names_one:
        yield (
            f"checkpoint.which={checkpoint.which} has no effect:"
            f" checkpoint.resume={checkpoint.resume} names one checkpoint"
        )
    if checkpoint.average and mode not in ("predict", "export"):
        yield (
            "checkpoint.average=true has no effect: it is for mode=predict and export, and"
            f" mode={mode}"
        )


def _of_hosts(run: RequestedRun) -> Iterator[str]:
    config = run.config
    if config.host_range and config.device != "cpu":
        yield (
            f"launch.nnodes={run.asked.launch.nnodes}: on GPUs a lost host costs the steps since"
            " the last checkpoint"
        )
    elif not config.host_range and config.mode == "train" and config.process_count > 1:
        hosts = config.launch.nnodes
        what = "a lost process costs the steps since the last checkpoint"
        if int(hosts) > 1:
            remedy = f"; launch.nnodes={hosts}:{hosts} loses none" if config.device == "cpu" else ""
            yield f"launch.nnodes={hosts}: {what}{remedy}"
        elif run.world:
            yield f"under torchrun {what}; `python launch.py` without torchrun loses none"
    if config.launch.backend == "gloo" and config.device == "cuda":
        yield (
            "launch.backend=gloo copies the gradients of GPUs through host memory;"
            " launch.backend=nccl is faster"
        )
