"""From what the user asked for to what this machine will do: every `auto` gets its value, before anything is frozen."""

from __future__ import annotations

import dataclasses
from typing import Any

from ddp_train.config.machine import Machine
from ddp_train.config.schema import Config
from ddp_train.distributed.world import World, new_run_id

IN_MEMORY = ("digits", "mnist", "fashion_mnist", "cifar10", "synthetic", "linear_regression")
"""Data sets that are held in memory: a batch is one indexing operation, which no loader process makes faster."""
CORES_PER_GPU = 10
"""A core decodes and crops 900 images/s (500 x 375 JPEGs), a GPU of 2024 trains ResNet-50 with 7,000: docs/data.md."""
READERS = 4
"""Threads that read files for the GPU to decode: one reads over 10,000 a second that the kernel holds in memory."""
FUSED = ("sgd", "adam", "adamw")
"""Optimizers with a fused implementation in torch 2.11 to 2.15 (adadelta and rmsprop have none)."""
IMAGE_MODELS = ("cnn", "torchvision")


def resolve(config: Config, machine: Machine, world: World | None) -> Config:
    """A copy of `config` without `auto`. What contradicts the machine is left for `check` to name."""
    device = config.device if config.device != "auto" else "cuda" if machine.gpus else "cpu"
    launch = dataclasses.replace(config.launch)
    if world:
        launch.nproc_per_node, launch.nnodes = world.local_size, world.hosts
    elif launch.nproc_per_node == "auto":
        alone = config.strategy.name != "ddp"
        launch.nproc_per_node = 1 if alone else machine.gpus if device == "cuda" else 2
    if launch.backend == "auto":
        launch.backend = "nccl" if device == "cuda" else "gloo"
    processes_here = max(1, int(launch.nproc_per_node))
    cores = machine.cpus // processes_here
    ordered = config.train.reduction == "ordered"
    if launch.threads_per_process == "auto":  # the number of threads changes the bits
        launch.threads_per_process = 1 if ordered else max(1, cores)
    deterministic = device == "cpu" or ordered if config.deterministic == "auto" else config.deterministic
    if getattr(config.data, "decode", "") == "auto":
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, decode=_decode(device, cores)))
    return dataclasses.replace(
        config,
        device=device,
        deterministic=deterministic,
        launch=launch,
        tuning=_tuning(config, device, bool(deterministic), machine, cores),
        run_dir=config.run_dir or f"runs/{config.name}/{new_run_id(world)}",
    )


def _tuning(config: Config, device: str, deterministic: bool, machine: Machine, cores: int):
    """cores: of each process."""
    tuning = dataclasses.replace(config.tuning)
    gpu = device == "cuda"
    regression = config.data.name == "linear_regression"
    chosen = {
        "precision": "bf16" if gpu and machine.compute_capability >= (8, 0) and not regression else "fp32",
        "num_workers": _workers(config.data, cores),
        "pin_memory": gpu,
        "non_blocking": gpu,
        "channels_last": gpu and config.model.name in IMAGE_MODELS,
        # DataParallel's replicas autotune in one thread each: ResNet-50 had not finished its first steps after 150 s.
        "cudnn_benchmark": gpu and not deterministic and config.strategy.name != "dp",
        "tf32": gpu,
        "optimizer": "fused" if gpu and config.optimizer.name in FUSED else "foreach",
    }
    for name, value in chosen.items():
        if getattr(tuning, name) == "auto":
            setattr(tuning, name, value)
    return tuning


def _decode(device: str, cores: int) -> str:
    """How images are decoded: on the host where its cores keep up with a GPU."""
    return "gpu" if device == "cuda" and cores < CORES_PER_GPU else "threads"


def _workers(data: Any, cores: int) -> int:
    """Loader processes, or threads: as many as there is work for."""
    if data.name in IN_MEMORY:
        return 0
    if data.name != "image_folder":
        return min(8, cores)
    return min(READERS, cores) if data.decode == "gpu" else min(32, cores)


def described(config: Config) -> dict[str, Any]:
    """The fields of summary.json that are known before the run starts."""
    return {
        "mode": config.mode,
        "strategy": config.strategy.name,
        "world_size": process_count(config),
        "device": config.device,
        "backend": config.launch.backend if config.strategy.name == "ddp" else "none",
        "global_batch_size": config.train.global_batch_size,
        "epochs": config.train.epochs,
        "seed": config.seed,
    }


def process_count(config: Config) -> int:
    """Processes of a resolved config, over all hosts."""
    return int(config.launch.nproc_per_node) * config.launch.nnodes
