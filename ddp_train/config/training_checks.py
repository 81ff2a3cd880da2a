"""Checks of the global batch, and of what each mode does."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_train.config.packages import how_to_install_extra, is_installed
from ddp_train.options.key import range_of
from ddp_train.options.problem import Problem
from ddp_train.options.schema import Config, RequestedRun
from ddp_train.options.sections import TrainConfig
from ddp_train.text import counted, did_you_mean, shown


def problems(run: RequestedRun) -> Iterator[Problem]:
    config = run.config
    trains_by_samples = not config.uses_trained and config.data.batch_by == "samples"
    # Batches of other sizes are dealt out one sample at a time.
    if trains_by_samples and not config.data.batch_sampler:
        yield from _batch(run)
    yield from _evaluations(config.train)
    if config.train.ema_warmup and config.train.ema_decay is None:
        yield Problem(
            "train.ema_warmup=true",
            "has an effect only with train.ema_decay",
            "add train.ema_decay=0.999",
        )
    if config.mode == "evaluate":
        yield from _unknown_sets(config, "evaluate.sets", config.evaluate.sets)
    if config.mode == "predict":
        if config.predict.split != "train":
            yield from _unknown_sets(config, "predict.split", [config.predict.split])
        if config.predict.format == "parquet":
            yield from _parquet()
    if config.mode == "export":
        yield from _export(config)


def _evaluations(train: TrainConfig) -> Iterator[Problem]:
    by_steps = train.evaluate_every_steps
    by_epochs = train.evaluate_every_epochs
    if by_steps is not None and by_epochs is not None:
        yield Problem(
            f"train.evaluate_every_steps={by_steps}",
            f"contradicts train.evaluate_every_epochs={by_epochs}",
            "give one of them",
        )


def _batch(run: RequestedRun) -> Iterator[Problem]:
    """A global batch that cannot be split evenly."""
    config = run.config
    batch = config.train.global_batch_size
    shards = config.strategy.virtual_shards
    instead = ""
    if shards is not None:
        unit = shards
        over = counted(shards, "virtual shard")
    elif range_of(run.asked.launch.nproc_per_node) or config.host_range:
        return  # some processes have a sample less with some numbers: see `launch_checks`
    else:
        processes = config.process_count
        accumulation = config.train.accumulation_steps
        unit = processes * accumulation
        over = f"{counted(processes, 'process')} x {counted(accumulation, 'accumulation step')}"
        on_one_host = 1 < processes == config.launch.nproc_per_node
        if on_one_host and not run.world and unit <= batch:
            instead = (
                f", or launch.nproc_per_node=1:{processes}: with a range, some processes may get"
                " a sample more than others"
            )
    if not unit or batch % unit == 0:
        return
    lower = batch // unit * unit
    upper = lower + unit
    divisible = f"{lower} or {upper}" if lower else f"{upper}"
    yield Problem(
        f"train.global_batch_size={batch}",
        f"cannot be split over {over}",
        f"use train.global_batch_size={divisible}{instead}",
    )


def _unknown_sets(config: Config, key: str, names: list[str]) -> Iterator[Problem]:
    """Sets that are not there, as far as is known before the data are opened."""
    known = config.data.sets()
    if known is None:
        return
    for name in names:
        if name not in known:
            guess = did_you_mean(name, known)
            yield Problem(
                f"{key}={name}", f"there is no set {name}", f"there are {', '.join(known)}{guess}"
            )


def _parquet() -> Iterator[Problem]:
    if not is_installed("pyarrow"):
        remedy = f"{how_to_install_extra('parquet')}, or use predict.format=npz"
        yield Problem("predict.format=parquet", "pyarrow is not installed", remedy)


def _export(config: Config) -> Iterator[Problem]:
    formats = config.export.formats
    if config.process_count > 1:
        yield Problem(
            "mode=export",
            f"export runs in one process, and {config.process_count} would be started",
            "use launch.nproc_per_node=1",
        )
    libraries = ("onnx", "onnxscript", "onnxruntime")
    missing = [name for name in libraries if not is_installed(name)]
    if missing and "onnx" in formats:
        yield Problem(
            f"export.formats={shown(formats)}",
            f"{' and '.join(missing)} must be installed",
            how_to_install_extra("onnx"),
        )
    if not formats:
        yield Problem("export.formats=[]", "must name a format", "use 'export.formats=[torch]'")
