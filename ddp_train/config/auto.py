"""Resolves every `auto` for this hardware, with the reason of each choice, before the config is
frozen."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ddp_train.config.processes import counts_of, first_count, hosts_at_start
from ddp_train.distributed.agent import range_of_hosts
from ddp_train.distributed.environment import new_run_id
from ddp_train.distributed.world import World
from ddp_train.hardware import Hardware, why_no_triton
from ddp_train.options.key import range_of
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import Config
from ddp_train.options.sections import TuningConfig

RESIDENT_SHARE = 0.25
"""Part of a GPU's memory that a data set may take for data.placement=auto to hold it there."""
CORES_PER_GPU = 8
"""A core decodes and crops 700 to 900 images/s (500 x 375 JPEGs); nvJPEG beside ResNet-50 gave
5,000 in all on an H200: docs/benchmarks/jpeg.md."""
READERS = 4
"""Threads that read files for the GPU to decode: one reads over 10,000 a second from the kernel's
page cache."""
HOST_THREADS = 4
"""CPU threads of torch per GPU, which only prepare batches: with 64, an epoch of MNIST in batches
of 64 took 52 s; with loader processes, which have one each, 4.8 s."""
COMPILING_PAYS_STEPS = 2000
"""ResNet-50 at batch 256 on an H200: 17 ms less a step, 35 s to compile."""
CAPTURED_IF_IT_PAYS = "compiled; if the host is what is slow"
"""Reason for tuning.cuda_graph that leaves the choice to a trial, see
`performance.worth_capturing`."""
OWN_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that capture CUDA graphs themselves."""
LR_POWERS = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
"""Exponent of global_batch_size / lr_base_batch. linear: arXiv:1706.02677, for SGD; sqrt:
arXiv:1404.5997, also for LAMB."""


def resolve(config: Config, hardware: Hardware, world: World | None) -> Config:
    """A copy of `config` without `auto`, and with `reasons`. Contradictions with the hardware are
    left to `check`."""
    if config.device != "auto":
        device = config.device
    else:
        device = "cuda" if hardware.gpus else "cpu"
    launch = dataclasses.replace(config.launch)
    asked = range_of(launch.nproc_per_node)
    gpus = hardware.gpus if device == "cuda" else None
    counts = []
    if range_of(launch.nnodes):
        hosts = str(launch.nnodes)
    else:
        hosts = range_of_hosts() if world else None
    launch.nnodes = hosts_at_start(launch.nnodes)
    if world:
        launch.nproc_per_node = world.local_size
        launch.nnodes = world.hosts
    elif asked:
        counts = counts_of(asked, config, gpus, hardware.cpus)
        launch.nproc_per_node = first_count(asked, counts, gpus)
        counts = counts if config.mode == "train" else []  # otherwise it does not change
    elif launch.nproc_per_node == "auto":
        several = config.strategy.has_process_group and config.mode != "export"
        if not several:
            launch.nproc_per_node = 1
        else:
            launch.nproc_per_node = hardware.gpus if device == "cuda" else 2
    if launch.backend == "auto":
        launch.backend = "nccl" if device == "cuda" else "gloo"
    cores = hardware.cpus // max(1, int(launch.nproc_per_node))
    ordered = config.strategy.fixes_bits
    if launch.threads_per_process == "auto":  # the number of threads changes the bits
        launch.threads_per_process = (
            1 if ordered else max(1, cores if device == "cpu" else min(cores, HOST_THREADS))
        )
    if config.deterministic == "auto":
        deterministic = device == "cpu" or ordered
    else:
        deterministic = config.deterministic
    config = dataclasses.replace(
        config,
        device=device,
        deterministic=deterministic,
        launch=launch,
        process_range=str(config.launch.nproc_per_node) if counts else None,
        process_counts=counts,
        host_range=hosts if config.mode == "train" else None,
        data=_data(config, device, cores, hardware),
        task=_task(config),
        run_dir=config.run_dir or f"runs/{config.name}/{new_run_id(world)}",
    )
    tuning, reasons = _tuning(config, hardware)
    return dataclasses.replace(config, tuning=tuning, reasons={**config.reasons, **reasons})


def at_another_number(asked: Config, config: Config, hardware: Hardware, processes: int) -> Config:
    """The resolved `config` of a run with a range, for another number of processes: what `auto`
    chooses by their number is chosen anew. Not how images are decoded, which changes pixels. asked:
    before `resolve`."""
    launch = dataclasses.replace(asked.launch, nproc_per_node=processes)
    data = asked.data
    if data.decode == "auto":
        data = dataclasses.replace(data, decode=config.data.decode)
    asked = dataclasses.replace(
        asked, device=config.device, run_dir=config.run_dir, launch=launch, data=data
    )
    other = resolve(asked, hardware, None)
    return dataclasses.replace(
        other, process_range=config.process_range, process_counts=config.process_counts
    )


def _data(config: Config, device: str, cores: int, hardware: Hardware) -> Any:
    data = config.data
    chosen = {}
    if data.decode == "auto":  # on the host, unless its cores are too few for a GPU
        chosen["decode"] = "gpu" if device == "cuda" and cores < CORES_PER_GPU else "processes"
    if data.placement == "auto":
        size = data.in_memory_bytes()
        limit = math.inf if device == "cpu" else RESIDENT_SHARE * hardware.gpu_bytes
        wanted = config.tuning.name != "none" and config.tuning.num_workers in ("auto", 0)
        chosen["placement"] = "device" if wanted and size is not None and size <= limit else "host"
    return dataclasses.replace(data, **chosen)


def _task(config: Config) -> Any:
    """What task=auto means where the data set knows it; otherwise the targets tell, in the
    worker."""
    known = config.data.task if config.task.name == "auto" else None
    return OPTIONS["task"][known]() if known else config.task


Choice = tuple[Any, str]
"""The value of a switch, and why it has it, in a few words; no words where it is on for every
GPU."""


def _tuning(config: Config, hardware: Hardware) -> tuple[TuningConfig, dict[str, str]]:
    """The switches without `auto`, and the reason for each value that was chosen."""
    tuning = dataclasses.replace(config.tuning)
    reasons = {}
    for choose in (
        _choices,
        _choice_of_cuda_graph,
        _choice_of_buckets,
    ):  # each needs the values of those before
        for name, (value, reason) in choose(
            dataclasses.replace(config, tuning=tuning), hardware
        ).items():
            if getattr(tuning, name) == "auto":
                setattr(tuning, name, value)
                reasons[name] = reason
    if config.optimizer.is_custom and tuning.name == "none" and tuning.optimizer == "loop":
        tuning.optimizer = "default"  # loop is the baseline of the built-in optimizers
    return tuning, reasons


def _choices(config: Config, hardware: Hardware) -> dict[str, Choice]:
    """Value and reason of each switch except cuda_graph and buckets. All keys outside of `tuning`
    are resolved."""
    gpu = config.device == "cuda"
    model = config.model
    data = config.data
    why_not = why_no_triton() if gpu else ""
    no_gpu = (not gpu, "no GPU")
    no_triton = (bool(why_not), why_not)
    no_dp = (config.strategy.spreads_over_gpus, f"strategy={config.strategy.name}")
    repeatable = (bool(config.deterministic), "deterministic=true")
    shapes = (data.batch_by == "tokens", "data.batch_by=tokens: shapes differ")
    cores = hardware.cpus // max(1, int(config.launch.nproc_per_node))
    capability = "compute capability {}.{}".format(*hardware.compute_capability)
    bf16, why_bf16 = _on_unless(
        capability,
        no_gpu,
        (hardware.compute_capability < (8, 0), capability),
        (bool(data.is_regression), "a regression"),
    )
    old = ((0, 0) < hardware.compute_capability < (7, 0), capability)  # Triton's least
    fused, why_fused = _on_unless(
        "", no_gpu, (not config.optimizer.has_fused, f"no fused {config.optimizer.name}")
    )
    steps = config.train.max_steps
    largest = config.tuning.name == "max"
    in_memory = data.in_memory_bytes() is not None
    return {
        "precision": ("bf16" if bf16 else "fp32", why_bf16),
        "num_workers": (_workers(data, cores), "" if in_memory else f"{cores} cores each"),
        "pin_memory": _on_unless("", no_gpu),
        "non_blocking": _on_unless("", no_gpu),
        "copy_stream": _on_unless(
            "", no_gpu, (config.tuning.non_blocking is False, "non_blocking=false")
        ),
        "channels_last": _on_unless(
            "convolutions", no_gpu, (not model.takes_images, "no known convolutions")
        ),
        # DataParallel's replicas autotune in one thread each: ResNet-50 had not finished its first
        # steps after 150 s.
        "cudnn_benchmark": _on_unless("", no_gpu, repeatable, no_dp, shapes),
        "tf32": _on_unless("", no_gpu),
        "triton_kernels": _on_unless("", no_gpu, no_dp, old, no_triton),
        "optimizer": ("default", "your own class decides")
        if config.optimizer.is_custom
        else ("fused" if fused else "foreach", why_fused),
        # It takes most of a minute, and saves a third of the time of a large model's step.
        "compile": _on_unless(
            "tuning=max" if largest else "long steps",
            no_gpu,
            (config.mode != "train", "an evaluation"),
            no_triton,
            no_dp,
            (config.strategy.sync_bn, "strategy.sync_bn"),
            repeatable,
            shapes,
            (not largest and not model.worth_compiling(), "no model known to be large"),
            (not largest and is_launch_bound(config), "a small model"),
            (
                not largest and steps is not None and steps < COMPILING_PAYS_STEPS,
                f"under {COMPILING_PAYS_STEPS} steps",
            ),
        ),
    }


def _choice_of_cuda_graph(config: Config, hardware: Hardware) -> dict[str, Choice]:
    """All other keys but buckets are resolved."""
    largest = config.tuning.name == "max"
    small = is_launch_bound(config)
    # A compiled step is often shorter than its launches take the host. Batches of the user's own
    # may differ in shape.
    compiled = (
        bool(config.tuning.compile)
        and config.model.worth_compiling()
        and config.data.name != "custom"
    )
    choice = _on_unless(
        "tuning=max" if largest else "a small model" if small else CAPTURED_IF_IT_PAYS,
        (config.device != "cuda", "no GPU"),
        (not (largest or small or compiled), "no small model of ours, and not compiled"),
        # It may do what a capture forbids: ddp_train.all_gather reads sizes from the device.
        (config.task.name == "custom", "a task of your own"),
        *((True, f"because of {key}") for key in capture_blockers(config)),
    )
    return {"cuda_graph": choice}


def _choice_of_buckets(config: Config, hardware: Hardware) -> dict[str, Choice]:
    """Kernel by kernel one bucket, and so one graph, is the fastest: the host launches each graph
    by itself. Captured, where the exchange is a large part of a step, to hide it saves more than a
    few cuts cost (docs/benchmarks/buckets.md). All other keys are resolved."""
    tuning = config.tuning
    sizes = config.strategy.sizes_of_buckets()
    fewer, why = _on_unless(
        "NVLink",
        (config.device != "cuda", "no GPU"),
        (not tuning.compile or bool(why_no_buckets(config)), ""),
        (bool(sizes), " ".join(sizes)),
        (int(config.launch.nnodes) > 1 or bool(config.host_range), "several hosts"),
        (not hardware.nvlink, "no fast NVLink between all GPUs"),
    )
    return {
        "buckets": ("default" if not fewer else "by_flops" if tuning.cuda_graph else "one", why)
    }


def why_no_buckets(config: Config, asked: str = "one") -> str:
    """Why it makes no difference how large DDP's buckets are; "" if it does. asked:
    tuning.buckets."""
    if config.mode != "train":
        return f"mode={config.mode} does not train"
    if not config.strategy.has_buckets:
        return f"strategy={config.strategy.name} has no buckets of gradients"
    if (
        asked in ("large", "by_flops")
        and config.strategy.comm_hook == "powersgd"
        and config.launch.backend == "gloo"
    ):
        return "strategy.comm_hook=powersgd over gloo needs all gradients in one"
    most = max(config.process_counts, default=config.process_count)
    return "one process exchanges nothing" if most == 1 else ""


def is_launch_bound(config: Config) -> bool:
    """Whether a GPU runs the model's kernels faster than a host launches them. All keys outside of
    `tuning` are resolved."""
    return config.model.is_launch_bound(_items_at_once(config))


def _items_at_once(config: Config) -> float:
    """Samples, or tokens, of a forward pass on one process."""
    parts = config.train.accumulation_steps * config.process_count
    # There are 0 processes where a GPU is asked for and there is none.
    return config.train.global_batch_size / max(1, parts) * config.data.length


def _on_unless(why: str, *against: tuple[bool, str]) -> Choice:
    """Off, and the first reason that applies; on if none does."""
    return next(((False, why_not) for applies, why_not in against if applies), (True, why))


def capture_blockers(config: Config) -> dict[str, str]:
    """Reasons a step cannot be captured: key -> `required value (why)`. All keys but
    tuning.cuda_graph are resolved."""
    train = config.train
    strategy = config.strategy
    tuning = config.tuning
    promised = config.optimizer.is_custom and tuning.cuda_graph is True  # the worker asks the class
    no_python = "a captured step runs no Python"
    rules = {
        "hooks": (bool(config.hooks), "[]", no_python),
        "strategy": (bool(strategy.capture_blocker), "ddp or single", strategy.capture_blocker),
        "train.accumulation_steps": (
            train.accumulation_steps > 1,
            "1",
            "a graph holds one micro-batch and its update",
        ),
        "data.batch_by": (
            config.data.batch_by == "tokens",
            "samples",
            "the shapes of its batches differ",
        ),
        "train.on_non_finite": (
            train.on_non_finite == "skip",
            "stop",
            "the host decides whether to skip",
        ),
        "launch.backend": (
            strategy.has_process_group and config.launch.backend == "gloo",
            "nccl",
            "gloo copies gradients to the host",
        ),
        "optimizer": (
            not (config.optimizer.can_be_captured or promised),
            " or ".join(name for name, one in OPTIONS["optimizer"].items() if one.can_be_captured),
            "others wait for the host",
        ),
        "tuning.compile_mode": (
            bool(tuning.compile) and tuning.compile_mode in OWN_GRAPHS,
            "default or max-autotune-no-cudagraphs",
            "the other modes capture graphs themselves",
        ),
        "tuning.activation_checkpointing": (
            bool(tuning.activation_checkpointing),
            "[]",
            "it reads the state of the random numbers on the host",
        ),
        "tuning.optimizer": (
            config.optimizer.has_fused and tuning.optimizer != "fused",
            "fused",
            "the other implementations read the learning rate on the host",
        ),
        "tuning.precision": (
            tuning.precision == "fp64",
            "fp32, bf16 or fp16",
            "fused optimizers read its learning rate as float32",
        ),
        "strategy.find_unused_parameters": (
            strategy.find_unused_parameters,
            "false",
            "it walks each autograd graph",
        ),
        "strategy.comm_hook": (strategy.comm_hook == "powersgd", "none", no_python),
        "model.freeze_epochs": (
            config.model.freeze_epochs is not None,
            "null",
            "a graph is that of fixed parameters",
        ),
        "strategy.sync_bn": (strategy.sync_bn, "false", "it reads its counts from the device"),
    }
    return {key: f"{value} ({why})" for key, (against, value, why) in rules.items() if against}


def optimizer_at_batch(config: Config) -> Any:
    """The optimizer's section with the learning rate for the global batch; the frozen config keeps
    what was asked."""
    if config.optimizer.lr_scaling == "none":
        return config.optimizer
    ratio = config.train.global_batch_size / config.optimizer.lr_base_batch
    factor = ratio ** LR_POWERS[config.optimizer.lr_scaling]
    scaled = ("lr", "adamw_lr")
    groups = [
        {name: value * factor if name in scaled else value for name, value in group.items()}
        for group in config.optimizer.groups
    ]
    rates = {
        name: getattr(config.optimizer, name) * factor
        for name in scaled
        if hasattr(config.optimizer, name)
    }
    return dataclasses.replace(config.optimizer, **rates, groups=groups, lr_scaling="none")


def _workers(data: Any, cores: int) -> int:
    """Loader processes; for data.decode=gpu, threads that read files."""
    if data.in_memory_bytes() is not None:
        return 0
    if data.decode == "gpu":
        return min(READERS, cores)
    return min(32 if data.class_folders else 8, cores)


def described(config: Config) -> dict[str, Any]:
    """The fields of summary.json that are known before the run starts."""
    return {
        "mode": config.mode,
        "strategy": config.strategy.name,
        "world_size": config.process_count,
        "device": config.device,
        "backend": config.launch.backend if config.strategy.has_process_group else "none",
        "global_batch_size": config.train.global_batch_size,
        "epochs": config.train.epochs,
        "seed": config.seed,
    }
