"""Resolves every `auto` for this hardware, with the reason of each choice, before the config is
frozen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from ddp_train.config.processes import counts_of, first_count, hosts_at_start
from ddp_train.distributed.agent import range_of_hosts
from ddp_train.distributed.environment import new_run_id
from ddp_train.distributed.world import World
from ddp_train.hardware import Hardware, why_no_triton
from ddp_train.options.key import range_of
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import Config, DataConfig, TaskConfig
from ddp_train.options.sections import LaunchConfig, TuningConfig

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
    """A copy of a config without `auto`, and with `reasons`.

    Contradictions with the hardware are left to `check`.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if hardware.gpus else "cpu"
    launch, counts = _launch(config, device, hardware, world)
    hosts = range_of_hosts() if world else None
    if range_of(config.launch.nnodes):
        hosts = str(config.launch.nnodes)
    deterministic = config.deterministic
    if deterministic == "auto":
        deterministic = device == "cpu" or config.strategy.fixes_bits
    config = dataclasses.replace(
        config,
        device=device,
        deterministic=deterministic,
        launch=launch,
        process_range=str(config.launch.nproc_per_node) if counts else None,
        process_counts=counts,
        host_range=hosts if config.mode == "train" else None,
        data=_data(config, device, hardware, _cores_each(launch, hardware)),
        task=_task(config),
        run_dir=config.run_dir or f"runs/{config.name}/{new_run_id(world)}",
    )
    tuning, reasons = _tuning(config, hardware)
    return dataclasses.replace(config, tuning=tuning, reasons={**config.reasons, **reasons})


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
        other, process_range=config.process_range, process_counts=config.process_counts
    )


def _launch(
    config: Config, device: str, hardware: Hardware, world: World | None
) -> tuple[LaunchConfig, list[int]]:
    """The section `launch`, and the numbers of processes with which the run may continue."""
    launch = dataclasses.replace(config.launch, nnodes=hosts_at_start(config.launch.nnodes))
    counts: list[int] = []
    if world:
        launch.nproc_per_node = world.local_size
        launch.nnodes = world.hosts
    else:
        launch.nproc_per_node, counts = _processes(config, device, hardware)
    if launch.backend == "auto":
        launch.backend = "nccl" if device == "cuda" else "gloo"
    if launch.threads_per_process == "auto":
        cores = _cores_each(launch, hardware)
        most = cores if device == "cpu" else min(cores, HOST_THREADS)
        # The number of threads changes the bits.
        launch.threads_per_process = 1 if config.strategy.fixes_bits else max(1, most)
    return launch, counts


def _processes(config: Config, device: str, hardware: Hardware) -> tuple[int | str, list[int]]:
    """The processes of this host, and the numbers with which the run may continue."""
    asked = config.launch.nproc_per_node
    gpus = hardware.gpus if device == "cuda" else None
    span = range_of(asked)
    if span:
        counts = counts_of(span, config, gpus, hardware.cpus)
        number = first_count(span, counts, gpus)
        return number, counts if config.mode == "train" else []
    if asked != "auto":
        return asked, []
    if not config.strategy.has_process_group or config.mode == "export":
        return 1, []
    return 2 if gpus is None else gpus, []


def _cores_each(launch: LaunchConfig, hardware: Hardware) -> int:
    # There are 0 processes where a GPU is asked for and there is none.
    return hardware.cpus // max(1, int(launch.nproc_per_node))


def _data(config: Config, device: str, hardware: Hardware, cores: int) -> DataConfig:
    data = config.data
    chosen: dict[str, Any] = {}
    if data.decode == "auto":  # on the host, unless its cores are too few for a GPU
        chosen["decode"] = "gpu" if device == "cuda" and cores < CORES_PER_GPU else "processes"
    if data.placement == "auto":
        size = data.in_memory_bytes()
        limit = math.inf if device == "cpu" else RESIDENT_SHARE * hardware.gpu_bytes
        may_be_held = config.tuning.name != "none" and config.tuning.num_workers in ("auto", 0)
        fits = size is not None and size <= limit
        chosen["placement"] = "device" if may_be_held and fits else "host"
    return dataclasses.replace(data, **chosen)


def _task(config: Config) -> TaskConfig:
    """The task of task=auto where the data set knows it; else the worker asks the targets."""
    known = config.data.task if config.task.name == "auto" else None
    return OPTIONS["task"][known]() if known else config.task


Choice = tuple[Any, str]
"""The value of a switch, and why it has it, in a few words; no words where it is on for every
GPU."""


def _tuning(config: Config, hardware: Hardware) -> tuple[TuningConfig, dict[str, str]]:
    """The switches without `auto`, and the reason for each value that was chosen."""
    tuning = dataclasses.replace(config.tuning)
    config = dataclasses.replace(config, tuning=tuning)
    switches = _Switches(config, hardware)
    reasons = {}
    for name, choose in switches.in_order().items():
        if getattr(tuning, name) == "auto":
            value, reasons[name] = choose()
            setattr(tuning, name, value)
    if config.optimizer.is_custom and tuning.name == "none" and tuning.optimizer == "loop":
        tuning.optimizer = "default"  # loop is the baseline of the built-in optimizers
    return tuning, reasons


def _unless(reasons: Iterator[str], why: str = "") -> Choice:
    """Off for the first reason against it; on, for this reason, if there is none."""
    against = next(reasons, None)
    return (True, why) if against is None else (False, against)


class _Switches:
    """The choice of each switch under `tuning`; all keys outside of it are resolved."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        """config: each choice is set in its `tuning` before the next is made."""
        self.config = config
        self.hardware = hardware
        self.is_largest = config.tuning.name == "max"
        self.capability = "compute capability {}.{}".format(*hardware.compute_capability)

    def in_order(self) -> dict[str, Callable[[], Choice]]:
        return {
            "precision": self.precision,
            "num_workers": self.num_workers,
            "pin_memory": self.on_gpus,
            "non_blocking": self.on_gpus,
            "copy_stream": lambda: _unless(self.against_copy_stream()),
            "channels_last": lambda: _unless(self.against_channels_last(), "convolutions"),
            "cudnn_benchmark": lambda: _unless(self.against_timing()),
            "tf32": self.on_gpus,
            "triton_kernels": lambda: _unless(self.against_triton()),
            "optimizer": self.optimizer,
            "compile": self.compile,
            "cuda_graph": self.cuda_graph,  # asks whether the model is compiled
            "buckets": self.buckets,  # asks whether steps are captured
        }

    def against_all(self) -> Iterator[str]:
        if self.config.device != "cuda":
            yield "no GPU"

    def on_gpus(self) -> Choice:
        return _unless(self.against_all())

    def precision(self) -> Choice:
        is_bf16, why = _unless(self.against_bf16(), self.capability)
        return "bf16" if is_bf16 else "fp32", why

    def against_bf16(self) -> Iterator[str]:
        yield from self.against_all()
        if self.hardware.compute_capability < (8, 0):
            yield self.capability
        if self.config.data.is_regression:
            yield "a regression"

    def num_workers(self) -> Choice:
        """Loader processes; for data.decode=gpu, threads that read files."""
        data = self.config.data
        cores = _cores_each(self.config.launch, self.hardware)
        if data.in_memory_bytes() is not None:
            return 0, ""
        most = 32 if data.class_folders else 8
        if data.decode == "gpu":
            most = READERS
        return min(most, cores), f"{cores} cores each"

    def against_copy_stream(self) -> Iterator[str]:
        yield from self.against_all()
        if self.config.tuning.non_blocking is False:
            yield "non_blocking=false"

    def against_channels_last(self) -> Iterator[str]:
        yield from self.against_all()
        if not self.config.model.takes_images:
            yield "no known convolutions"

    def against_timing(self) -> Iterator[str]:
        yield from self.against_all()
        if self.config.deterministic:
            yield "deterministic=true"
        # DataParallel's replicas autotune in one thread each: ResNet-50 had not finished its first
        # steps after 150 s.
        yield from self.against_threads()
        yield from self.against_shapes()

    def against_threads(self) -> Iterator[str]:
        if self.config.strategy.spreads_over_gpus:
            yield f"strategy={self.config.strategy.name}"

    def against_shapes(self) -> Iterator[str]:
        if self.config.data.batch_by == "tokens":
            yield "data.batch_by=tokens: shapes differ"

    def against_triton(self) -> Iterator[str]:
        yield from self.against_all()
        yield from self.against_threads()
        if (0, 0) < self.hardware.compute_capability < (7, 0):  # the least that Triton takes
            yield self.capability
        if why_no_triton():
            yield why_no_triton()

    def optimizer(self) -> Choice:
        if self.config.optimizer.is_custom:
            return "default", "your own class decides"
        is_fused, why = _unless(self.against_fused())
        return "fused" if is_fused else "foreach", why

    def against_fused(self) -> Iterator[str]:
        yield from self.against_all()
        if not self.config.optimizer.has_fused:
            yield f"no fused {self.config.optimizer.name}"

    def compile(self) -> Choice:
        """It takes most of a minute, and saves a third of the time of a large model's step."""
        if self.is_largest:
            return _unless(self.against_compiling(), "tuning=max")
        reasons = chain(self.against_compiling(), self.against_waiting_for_compilation())
        return _unless(reasons, "long steps")

    def against_compiling(self) -> Iterator[str]:
        yield from self.against_all()
        if self.config.mode != "train":
            yield "an evaluation"
        if why_no_triton():
            yield why_no_triton()
        yield from self.against_threads()
        if self.config.strategy.sync_bn:
            yield "strategy.sync_bn"
        if self.config.deterministic:
            yield "deterministic=true"
        yield from self.against_shapes()

    def against_waiting_for_compilation(self) -> Iterator[str]:
        steps = self.config.train.max_steps
        if not self.config.model.worth_compiling():
            yield "no model known to be large"
        if is_launch_bound(self.config):
            yield "a small model"
        if steps is not None and steps < COMPILING_PAYS_STEPS:
            yield f"under {COMPILING_PAYS_STEPS} steps"

    def cuda_graph(self) -> Choice:
        if self.is_largest:
            why = "tuning=max"
        elif is_launch_bound(self.config):
            why = "a small model"
        else:
            why = CAPTURED_IF_IT_PAYS
        return _unless(self.against_capturing(), why)

    def against_capturing(self) -> Iterator[str]:
        yield from self.against_all()
        config = self.config
        # A compiled step is often shorter than its launches take the host. Batches of a data set of
        # your own may differ in shape.
        is_compiled = config.tuning.compile and config.model.worth_compiling()
        may_pay = is_compiled and not config.data.is_custom
        if not (self.is_largest or is_launch_bound(config) or may_pay):
            yield "no small model of ours, and not compiled"
        # It may do what a capture forbids: ddp_train.all_gather reads sizes from the device.
        if config.task.is_custom:
            yield "a task of your own"
        for key in capture_blockers(config):
            yield f"because of {key}"

    def buckets(self) -> Choice:
        """Kernel by kernel one bucket, and so one graph, is the fastest: the host launches each
        graph by itself. Captured, where the exchange is a large part of a step, to hide it saves
        more than a few cuts cost (docs/benchmarks/buckets.md)."""
        has_fewer, why = _unless(self.against_fewer_buckets(), "NVLink")
        if not has_fewer:
            return "default", why
        return "by_flops" if self.config.tuning.cuda_graph else "one", why

    def against_fewer_buckets(self) -> Iterator[str]:
        yield from self.against_all()
        config = self.config
        if not config.tuning.compile or why_no_buckets(config):
            yield ""
        sizes = config.strategy.sizes_of_buckets()
        if sizes:
            yield " ".join(sizes)
        if int(config.launch.nnodes) > 1 or config.host_range:
            yield "several hosts"
        if not self.hardware.nvlink:
            yield "no fast NVLink between all GPUs"


def why_no_buckets(config: Config, asked: str = "one") -> str:
    """Why it makes no difference how large DDP's buckets are; "" if it does.

    asked: tuning.buckets.
    """
    if config.mode != "train":
        return f"mode={config.mode} does not train"
    strategy = config.strategy
    if not strategy.has_buckets:
        return f"strategy={strategy.name} has no buckets of gradients"
    needs_one = strategy.comm_hook == "powersgd" and config.launch.backend == "gloo"
    if needs_one and asked in ("large", "by_flops"):
        return "strategy.comm_hook=powersgd over gloo needs all gradients in one"
    most = max(config.process_counts, default=config.process_count)
    return "one process exchanges nothing" if most == 1 else ""


def is_launch_bound(config: Config) -> bool:
    """Tell whether a GPU runs the model's kernels faster than a host launches them.

    All keys outside of `tuning` are resolved.
    """
    parts = config.train.accumulation_steps * config.process_count
    # There are 0 processes where a GPU is asked for and there is none.
    samples = config.train.global_batch_size / max(1, parts)
    return config.model.is_launch_bound(samples * config.data.length)


def capture_blockers(config: Config) -> dict[str, str]:
    """Reasons why a step cannot be captured: key -> `required value (why)`.

    All keys but tuning.cuda_graph are resolved.
    """
    return dict(
        [
            *_blockers_of_training(config),
            *_blockers_of_tuning(config),
            *_blockers_of_parameters(config),
        ]
    )


def _blockers_of_training(config: Config) -> Iterator[tuple[str, str]]:
    train = config.train
    strategy = config.strategy
    if config.hooks:
        yield "hooks", "[] (a captured step runs no Python)"
    if strategy.capture_blocker:
        yield "strategy", f"ddp or single ({strategy.capture_blocker})"
    if train.accumulation_steps > 1:
        yield "train.accumulation_steps", "1 (a graph holds one micro-batch and its update)"
    if config.data.batch_by == "tokens":
        yield "data.batch_by", "samples (the shapes of its batches differ)"
    if train.on_non_finite == "skip":
        yield "train.on_non_finite", "stop (the host decides whether to skip)"
    if strategy.has_process_group and config.launch.backend == "gloo":
        yield "launch.backend", "nccl (gloo copies gradients to the host)"
    # The worker asks a class of your own.
    is_asked_later = config.optimizer.is_custom and config.tuning.cuda_graph is True
    if not config.optimizer.can_be_captured and not is_asked_later:
        able = [name for name, option in OPTIONS["optimizer"].items() if option.can_be_captured]
        yield "optimizer", f"{' or '.join(able)} (others wait for the host)"


def _blockers_of_tuning(config: Config) -> Iterator[tuple[str, str]]:
    tuning = config.tuning
    if tuning.compile and tuning.compile_mode in OWN_GRAPHS:
        why = "the other modes capture graphs themselves"
        yield "tuning.compile_mode", f"default or max-autotune-no-cudagraphs ({why})"
    if tuning.activation_checkpointing:
        why = "it reads the state of the random numbers on the host"
        yield "tuning.activation_checkpointing", f"[] ({why})"
    if config.optimizer.has_fused and tuning.optimizer != "fused":
        why = "the other implementations read the learning rate on the host"
        yield "tuning.optimizer", f"fused ({why})"
    if tuning.precision == "fp64":
        why = "fused optimizers read its learning rate as float32"
        yield "tuning.precision", f"fp32, bf16 or fp16 ({why})"


def _blockers_of_parameters(config: Config) -> Iterator[tuple[str, str]]:
    strategy = config.strategy
    if strategy.find_unused_parameters:
        yield "strategy.find_unused_parameters", "false (it walks each autograd graph)"
    if strategy.comm_hook == "powersgd":
        yield "strategy.comm_hook", "none (a captured step runs no Python)"
    if config.model.freeze_epochs is not None:
        yield "model.freeze_epochs", "null (a graph is that of fixed parameters)"
    if strategy.sync_bn:
        yield "strategy.sync_bn", "false (it reads its counts from the device)"


def optimizer_at_batch(config: Config) -> Any:
    """The optimizer's section with the learning rate for the global batch.

    The frozen config keeps what was asked.
    """
    optimizer = config.optimizer
    if optimizer.lr_scaling == "none":
        return optimizer
    ratio = config.train.global_batch_size / optimizer.lr_base_batch
    factor = ratio ** LR_POWERS[optimizer.lr_scaling]
    rates = optimizer.learning_rates
    changes = _scaled(vars(optimizer), rates, factor)
    groups = [group | _scaled(group, rates, factor) for group in optimizer.groups]
    return dataclasses.replace(optimizer, **changes, groups=groups, lr_scaling="none")


def _scaled(values: dict[str, Any], rates: Sequence[str], factor: float) -> dict[str, Any]:
    return {name: values[name] * factor for name in rates if name in values}


def run_facts(config: Config) -> dict[str, Any]:
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
