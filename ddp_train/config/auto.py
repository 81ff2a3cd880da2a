"""The value of every `auto` on this hardware, chosen before the config is frozen."""

from __future__ import annotations

import dataclasses
import math

from ddp_train.config.processes import cores_each, counts_of, first_count, hosts_at_start
from ddp_train.config.switches import resolve_tuning
from ddp_train.distributed.agent import range_of_hosts
from ddp_train.distributed.environment import new_run_id
from ddp_train.distributed.world import World
from ddp_train.hardware import Hardware
from ddp_train.options.key import range_of
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import Config, DataConfig, TaskConfig
from ddp_train.options.sections import LaunchConfig
from ddp_train.text import dotted

RESIDENT_SHARE = 0.25
"""Part of a GPU's memory that a data set may take for data.placement=auto to hold it there."""
CORES_PER_GPU = 8
"""A core decodes and crops 700 to 900 images/s (500 x 375 JPEGs); nvJPEG beside ResNet-50 gave
5,000 in all on an H200: docs/inside/benchmarks/jpeg.md."""
HOST_THREADS = 4
"""CPU threads of torch per GPU, which only prepare batches: with 64, an epoch of MNIST in batches
of 64 took 52 s; with loader processes, which have one each, 4.8 s."""


def resolve(config: Config, hardware: Hardware, world: World | None) -> Config:
    """A copy of a config without `auto`, with `reasons` and `chosen_keys`.

    Contradictions with the hardware are left to `check`.
    """
    resolved = dataclasses.replace(config, process_range=None, process_counts=[], host_range=None)
    asked = dotted(dataclasses.asdict(config))
    resolved.chosen_keys = [key for key, value in asked.items() if value == "auto"]
    if world is not None and "launch.nproc_per_node" in resolved.chosen_keys:
        resolved.chosen_keys.remove("launch.nproc_per_node")  # it was given to torchrun
    if resolved.device == "auto":
        resolved.device = "cuda" if hardware.gpus else "cpu"
    if resolved.deterministic == "auto":
        resolved.deterministic = resolved.device == "cpu" or config.strategy.fixes_bits
    resolved.launch = _launch(resolved, hardware, world)
    resolved.data = _data(resolved, hardware)
    resolved.task = _task(resolved)
    resolved.run_dir = config.run_dir or f"runs/{config.name}/{new_run_id(world)}"
    if config.mode == "train":
        resolved.host_range = _host_range(config, world)
        if world is None:
            resolved.process_counts = _process_counts(resolved, config.launch, hardware)
    if resolved.process_counts:
        resolved.process_range = str(config.launch.nproc_per_node)
    resolved.tuning, reasons = resolve_tuning(resolved, hardware)
    resolved.reasons = config.reasons | reasons
    return resolved


def at_another_number(asked: Config, config: Config, hardware: Hardware, processes: int) -> Config:
    """The resolved config of a run with a range, for another number of processes.

    What `auto` chooses by their number is chosen anew, but not how images are decoded, which
    changes pixels.

    asked: the config before `resolve`.
    """
    launch = dataclasses.replace(asked.launch, nproc_per_node=processes)
    data = asked.data
    if data.decode == "auto":
        data = dataclasses.replace(data, decode=config.data.decode)
    asked = dataclasses.replace(
        asked, device=config.device, run_dir=config.run_dir, launch=launch, data=data
    )
    other = resolve(asked, hardware, None)
    return dataclasses.replace(
        other,
        chosen_keys=config.chosen_keys,
        process_range=config.process_range,
        process_counts=config.process_counts,
    )


def _launch(config: Config, hardware: Hardware, world: World | None) -> LaunchConfig:
    launch = dataclasses.replace(config.launch)
    if world:
        launch.nproc_per_node = world.local_size
        launch.nnodes = world.hosts
    else:
        launch.nproc_per_node = _processes(config, hardware)
        launch.nnodes = hosts_at_start(launch.nnodes)
    if launch.backend == "auto":
        launch.backend = "nccl" if config.device == "cuda" else "gloo"
    if launch.threads_per_process == "auto":
        launch.threads_per_process = _threads(config, cores_each(launch, hardware))
    return launch


def _processes(config: Config, hardware: Hardware) -> int | str:
    """The processes of this host at the start."""
    asked = config.launch.nproc_per_node
    span = range_of(asked)
    if span:
        counts = counts_of(span, config, hardware)
        return first_count(span, counts, config, hardware)
    if asked != "auto":
        return asked
    if not config.strategy.has_process_group or config.mode == "export":
        return 1
    return hardware.gpus if config.device == "cuda" else 2


def _process_counts(config: Config, asked: LaunchConfig, hardware: Hardware) -> list[int]:
    """The numbers of processes that a run with a range may have, ascending; [] without a range.

    asked: the section `launch` before `auto` and the range were resolved.
    """
    span = range_of(asked.nproc_per_node)
    return counts_of(span, config, hardware) if span else []


def _host_range(config: Config, world: World | None) -> str | None:
    if range_of(config.launch.nnodes):
        return str(config.launch.nnodes)
    return range_of_hosts() if world else None


def _threads(config: Config, cores: int) -> int:
    if config.strategy.fixes_bits:  # the number of threads changes the bits
        return 1
    if config.device == "cuda":
        cores = min(cores, HOST_THREADS)
    return max(1, cores)


def _data(config: Config, hardware: Hardware) -> DataConfig:
    data = dataclasses.replace(config.data)
    if data.decode == "auto":
        data.decode = "processes"
        if config.device == "cuda" and cores_each(config.launch, hardware) < CORES_PER_GPU:
            data.decode = "gpu"
    if data.placement == "auto":
        data.placement = "host"
        if _fits_on_device(config, hardware):
            data.placement = "device"
    return data


def _fits_on_device(config: Config, hardware: Hardware) -> bool:
    """Tell whether the data set may be held whole where the run computes."""
    size = config.data.in_memory_bytes()
    has_loaders = config.tuning.num_workers not in ("auto", 0)
    if size is None or has_loaders or config.tuning.name == "none":
        return False
    limit = math.inf
    if config.device == "cuda":
        limit = RESIDENT_SHARE * hardware.gpu_bytes
    return size <= limit


def _task(config: Config) -> TaskConfig:
    """The task of task=auto where the data set knows it; else the worker asks the targets."""
    known = config.data.task
    if config.task.name == "auto" and known:
        return OPTIONS["task"][known]()
    return config.task
