"""From what the user asked for to what this machine will do: every `auto` gets its value, before anything is frozen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from ddp_train.config.machine import Machine
from ddp_train.config.schema import Config
from ddp_train.distributed.world import World, new_run_id

IN_MEMORY: dict[str, Callable[[Any], int]] = {
    "digits": lambda data: 1797 * 64 * 4,
    "mnist": lambda data: 70_000 * 28 * 28,
    "fashion_mnist": lambda data: 70_000 * 28 * 28,
    "cifar10": lambda data: 60_000 * 32 * 32 * 3,
    "synthetic": lambda data: (data.samples + data.test_samples) * data.channels * data.image_size**2,
    "linear_regression": lambda data: (data.samples + data.test_samples) * data.features * 4,
}
"""Data sets that are held in memory, and their bytes: a batch is one indexing operation, which no loader process makes
faster."""
RESIDENT_SHARE = 0.25
"""Of a GPU's memory, at most, for a data set that is held there without being asked for."""
CORES_PER_GPU = 8
"""A core decodes and crops 700 to 900 images/s (500 x 375 JPEGs); nvJPEG beside ResNet-50 gave 5,000 in all on an H200:
docs/benchmarks/jpeg.md."""
READERS = 4
"""Threads that read files for the GPU to decode: one reads over 10,000 a second that the kernel holds in memory."""
FUSED = ("sgd", "adam", "adamw")
"""Optimizers with a fused implementation in torch 2.11 to 2.15 (adadelta, rmsprop, lars and lamb have none)."""
LAYER_WISE = ("lars", "lamb")
"""Optimizers that adapt their rate to each layer."""
IMAGE_MODELS = ("cnn", "torchvision")
LAUNCH_BOUND = ("cnn", "mlp", "linear_regression", "gelu_mlp")
"""Models whose kernels take a GPU less time than a host takes to launch them."""
COMPILING_PAYS_STEPS = 2000
"""ResNet-50 at batch 256 on an H200: 17 ms less a step, 35 s to compile."""
LR_POWERS = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
"""Of the global batch over lr_base_batch. linear: arXiv:1706.02677, for SGD; sqrt: arXiv:1404.5997, for LAMB too."""


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
        data=_data(config, device, machine),
        tuning=_tuning(dataclasses.replace(config, launch=launch), device, bool(deterministic), machine, cores),
        run_dir=config.run_dir or f"runs/{config.name}/{new_run_id(world)}",
    )


def _data(config: Config, device: str, machine: Machine) -> Any:
    if getattr(config.data, "loader", "host") != "auto":
        return config.data
    size = IN_MEMORY[config.data.name](config.data) if config.data.name in IN_MEMORY else math.inf
    fits = math.isfinite(size) if device == "cpu" else size <= RESIDENT_SHARE * machine.gpu_bytes
    wanted = config.tuning.name != "none" and config.tuning.num_workers in ("auto", 0)
    return dataclasses.replace(config.data, loader="device" if fits and wanted else "host")


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
        "compile": gpu and _gains_by_compiling(config, deterministic),
    }
    for name, value in chosen.items():
        if getattr(tuning, name) == "auto":
            setattr(tuning, name, value)
    if tuning.cuda_graph == "auto":
        small = config.tuning.name == "max" or config.model.name in LAUNCH_BOUND
        tuning.cuda_graph = gpu and small and not against_cuda_graph(dataclasses.replace(config, tuning=tuning))
    return tuning


def _gains_by_compiling(config: Config, deterministic: bool) -> bool:
    """Whether compiling pays. It takes most of a minute, and saves a third of the time of a large model's step."""
    long = config.train.max_steps is None or config.train.max_steps >= COMPILING_PAYS_STEPS
    worth = config.tuning.name == "max" or (config.model.name == "torchvision" and long)
    plain = config.mode == "train" and config.strategy.name != "dp" and not getattr(config.strategy, "sync_bn", False)
    return worth and plain and not deterministic


def against_cuda_graph(config: Config) -> dict[str, str]:
    """What stands against recording a step: key -> what it must be, and why. Of a config that is resolved otherwise."""
    train, strategy, replayed = config.train, config.strategy, "a recorded step has no Python in it"
    rules = {
        "probe": (config.probe != "none", "none", replayed),
        "strategy": (strategy.name == "dp", "ddp or single", "DataParallel runs in several threads"),
        "train.accumulation_steps": (train.accumulation_steps > 1, "1", "one recording holds one share and its step"),
        "train.reduction": (train.reduction == "ordered", "all_reduce", replayed),
        "train.on_non_finite": (train.on_non_finite == "skip", "stop", "whether to skip is decided on the host"),
        "launch.backend": (
            strategy.name == "ddp" and config.launch.backend == "gloo", "nccl", "gloo takes gradients to the host"
        ),
        "optimizer": (config.optimizer.name not in FUSED, " or ".join(FUSED), "others are checked from the host"),
        "tuning.optimizer": (config.tuning.optimizer != "fused", "fused", "others read their rate on the host"),
        "strategy.find_unused_parameters": (
            getattr(strategy, "find_unused_parameters", False), "false", "it looks at each step's own graph"
        ),
        "strategy.comm_hook": (getattr(strategy, "comm_hook", "none") == "powersgd", "none", replayed),
        "strategy.sync_bn": (getattr(strategy, "sync_bn", False), "false", "it asks the device for its counts"),
    }  # fmt: skip
    return {key: f"{value}; {why}" for key, (against, value, why) in rules.items() if against}


def optimizer_at_batch(config: Config) -> Any:
    """The optimizer's section with the learning rate for the global batch; the frozen config keeps what was asked."""
    if config.optimizer.name == "custom":
        return config.optimizer
    ratio = config.train.global_batch_size / config.optimizer.lr_base_batch
    lr = config.optimizer.lr * ratio ** LR_POWERS[config.optimizer.lr_scaling]
    return dataclasses.replace(config.optimizer, lr=lr, lr_scaling="none")


def _decode(device: str, cores: int) -> str:
    """How images are decoded: on the host, unless its cores are too few for a GPU."""
    return "gpu" if device == "cuda" and cores < CORES_PER_GPU else "processes"


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
