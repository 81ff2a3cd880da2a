"""From what the user asked for to what this hardware will do: every `auto` gets its value, before anything is
frozen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from ddp_train.config.hardware import Hardware
from ddp_train.config.schema import Config, TuningConfig
from ddp_train.distributed.environment import new_run_id
from ddp_train.distributed.world import World

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
HOST_THREADS = 4
"""Of torch on the host of a GPU, which only prepares batches: with 64, an epoch of MNIST in batches of 64 took 52 s;
with loader processes, which have one each, 4.8 s."""
FUSED = ("sgd", "adam", "adamw")
"""Optimizers with a fused implementation in torch 2.11 to 2.15 (adadelta, rmsprop, lars and lamb have none)."""
LAYER_WISE = ("lars", "lamb")
"""Optimizers that adapt their rate to each layer."""
CAPTURABLE = (*FUSED, *LAYER_WISE)
"""Optimizers that a flag on the device stops, and whose rate may lie there: no step waits for the host."""
IMAGE_MODELS = ("cnn", "torchvision")
LAUNCH_BOUND = ("cnn", "mlp", "linear_regression", "gelu_mlp")
"""Models whose kernels take a GPU less time than a host takes to launch them."""
COMPILING_PAYS_STEPS = 2000
"""ResNet-50 at batch 256 on an H200: 17 ms less a step, 35 s to compile."""
OWN_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that record CUDA graphs by themselves."""
LR_POWERS = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
"""Of the global batch over lr_base_batch. linear: arXiv:1706.02677, for SGD; sqrt: arXiv:1404.5997, for LAMB too."""


def resolve(config: Config, hardware: Hardware, world: World | None) -> Config:
    """A copy of `config` without `auto`. What contradicts the hardware is left for `check` to name."""
    device = config.device if config.device != "auto" else "cuda" if hardware.gpus else "cpu"
    launch = dataclasses.replace(config.launch)
    if world:
        launch.nproc_per_node, launch.nnodes = world.local_size, world.hosts
    elif launch.nproc_per_node == "auto":
        alone = config.strategy.name != "ddp"
        launch.nproc_per_node = 1 if alone else hardware.gpus if device == "cuda" else 2
    if launch.backend == "auto":
        launch.backend = "nccl" if device == "cuda" else "gloo"
    processes_here = max(1, int(launch.nproc_per_node))
    cores = hardware.cpus // processes_here
    ordered = config.train.reduction == "ordered"
    if launch.threads_per_process == "auto":  # the number of threads changes the bits
        launch.threads_per_process = 1 if ordered else max(1, cores if device == "cpu" else min(cores, HOST_THREADS))
    deterministic = device == "cpu" or ordered if config.deterministic == "auto" else config.deterministic
    if getattr(config.data, "decode", "") == "auto":
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, decode=_decode(device, cores)))
    config = dataclasses.replace(
        config,
        device=device,
        deterministic=deterministic,
        launch=launch,
        data=_data(config, device, hardware),
        run_dir=config.run_dir or f"runs/{config.name}/{new_run_id(world)}",
    )
    return dataclasses.replace(config, tuning=_tuning(config, hardware))


def _data(config: Config, device: str, hardware: Hardware) -> Any:
    if getattr(config.data, "loader", "host") != "auto":
        return config.data
    size = IN_MEMORY[config.data.name](config.data) if config.data.name in IN_MEMORY else math.inf
    fits = math.isfinite(size) if device == "cpu" else size <= RESIDENT_SHARE * hardware.gpu_bytes
    wanted = config.tuning.name != "none" and config.tuning.num_workers in ("auto", 0)
    return dataclasses.replace(config.data, loader="device" if fits and wanted else "host")


def _tuning(config: Config, hardware: Hardware) -> TuningConfig:
    tuning = dataclasses.replace(config.tuning)
    for choose in (_choices, _choice_of_cuda_graph):  # the latter looks at what the others have become
        for name, (value, _) in choose(dataclasses.replace(config, tuning=tuning), hardware).items():
            if getattr(tuning, name) == "auto":
                setattr(tuning, name, value)
    return tuning


Choice = tuple[Any, str]
"""What `auto` means here, and why, in a few words; none where it is on for every GPU."""


def reasons(config: Config, hardware: Hardware) -> dict[str, str]:
    """Why the switches of a resolved config are what they are: those that have the value that `auto` gives them."""
    if config.tuning.name == "none":
        return {}
    choices = _choices(config, hardware) | _choice_of_cuda_graph(config, hardware)
    return {name: why for name, (value, why) in choices.items() if getattr(config.tuning, name) == value}


def _choices(config: Config, hardware: Hardware) -> dict[str, Choice]:
    """For each switch but one. Of a config that is resolved but for `tuning`."""
    gpu, model, data = config.device == "cuda", config.model.name, config.data
    no_gpu, no_dp = (not gpu, "no GPU"), (config.strategy.name == "dp", "strategy=dp")
    repeatable = (bool(config.deterministic), "deterministic=true")
    capability, cores = hardware.compute_capability, hardware.cpus // max(1, int(config.launch.nproc_per_node))
    bf16, why = _on_unless(
        f"compute capability {capability[0]}.{capability[1]}",
        no_gpu,
        (capability < (8, 0), f"compute capability {capability[0]}.{capability[1]}"),
        (data.name == "linear_regression", "a regression"),
    )
    fused, why_fused = _on_unless("", no_gpu, (config.optimizer.name not in FUSED, f"no fused {config.optimizer.name}"))
    steps, largest = config.train.max_steps, config.tuning.name == "max"
    return {
        "precision": ("bf16" if bf16 else "fp32", why),
        "num_workers": (_workers(data, cores), "" if data.name in IN_MEMORY else f"{cores} cores each"),
        "pin_memory": _on_unless("", no_gpu),
        "non_blocking": _on_unless("", no_gpu),
        "copy_stream": _on_unless("", no_gpu, (config.tuning.non_blocking is False, "non_blocking=false")),
        "channels_last": _on_unless("convolutions", no_gpu, (model not in IMAGE_MODELS, "no known convolutions")),
        # DataParallel's replicas autotune in one thread each: ResNet-50 had not finished its first steps after 150 s.
        "cudnn_benchmark": _on_unless("", no_gpu, repeatable, no_dp),
        "tf32": _on_unless("", no_gpu),
        "optimizer": ("fused" if fused else "foreach", why_fused),
        # It takes most of a minute, and saves a third of the time of a large model's step.
        "compile": _on_unless(
            "tuning=max" if largest else "torchvision's model",
            no_gpu,
            (config.mode != "train", "an evaluation"),
            no_dp,
            (getattr(config.strategy, "sync_bn", False), "strategy.sync_bn"),
            repeatable,
            (not largest and model != "torchvision", "not torchvision's model"),
            (not largest and steps is not None and steps < COMPILING_PAYS_STEPS, f"under {COMPILING_PAYS_STEPS} steps"),
        ),
    }


def _choice_of_cuda_graph(config: Config, hardware: Hardware) -> dict[str, Choice]:
    largest, launch_bound = config.tuning.name == "max", config.model.name in LAUNCH_BOUND
    choice = _on_unless(
        "tuning=max" if largest else "a small model",
        (config.device != "cuda", "no GPU"),
        (not largest and not launch_bound, "not a small model of ours"),
        *((True, f"because of {key}") for key in capture_blockers(config)),
    )
    return {"cuda_graph": choice}


def _on_unless(why: str, *against: tuple[bool, str]) -> Choice:
    """Off, and the first reason that applies; on if none does."""
    return next(((False, why_not) for applies, why_not in against if applies), (True, why))


def capture_blockers(config: Config) -> dict[str, str]:
    """What stands against recording a step: key -> what it must be, and why. Of a config that is resolved otherwise."""
    train, strategy, tuning, replayed = (
        config.train, config.strategy, config.tuning, "a recorded step has no Python in it"
    )  # fmt: skip
    rules = {
        "probe": (config.probe != "none", "none", replayed),
        "strategy": (strategy.name == "dp", "ddp or single", "DataParallel runs in several threads"),
        "train.accumulation_steps": (train.accumulation_steps > 1, "1", "one recording holds one share and its step"),
        "train.reduction": (train.reduction == "ordered", "all_reduce", replayed),
        "train.on_non_finite": (train.on_non_finite == "skip", "stop", "whether to skip is decided on the host"),
        "launch.backend": (
            strategy.name == "ddp" and config.launch.backend == "gloo", "nccl", "gloo takes gradients to the host"
        ),
        "optimizer": (
            config.optimizer.name not in CAPTURABLE, " or ".join(CAPTURABLE), "others are checked from the host"
        ),
        "tuning.compile_mode": (
            bool(tuning.compile) and tuning.compile_mode in OWN_GRAPHS,
            "default or max-autotune-no-cudagraphs", "the other modes record graphs of their own"
        ),
        "tuning.activation_checkpointing": (
            bool(tuning.activation_checkpointing), "[]", "it asks the host for the state of the random numbers"
        ),
        "tuning.optimizer": (
            config.optimizer.name in FUSED and tuning.optimizer != "fused", "fused",
            "others read their rate on the host"
        ),
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
