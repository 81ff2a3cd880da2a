"""The value of each switch under `tuning` for which `auto` was asked, with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from ddp_train.config.capture import capture_blockers
from ddp_train.config.processes import cores_each
from ddp_train.hardware import Hardware, why_no_triton
from ddp_train.options.schema import Config
from ddp_train.options.sections import TuningConfig

READERS = 4
"""Threads that read files for the GPU to decode: one reads over 10,000 a second from the kernel's
page cache."""
COMPILING_PAYS_STEPS = 2000
"""ResNet-50 at batch 256 on an H200: 17 ms less a step, 35 s to compile."""
CAPTURED_IF_IT_PAYS = "compiled; used if it makes a step faster"
"""Reason for tuning.cuda_graph that leaves the choice to a trial, see
`performance.worth_capturing`."""

Choice = tuple[Any, str]
"""The value of a switch and the reason in a few words; "" where it is on for every GPU."""


def resolve_tuning(config: Config, hardware: Hardware) -> tuple[TuningConfig, dict[str, str]]:
    """The switches without `auto`, and the reason for each value that was chosen.

    config: all keys outside of `tuning` are resolved.
    """
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


class _Switches:
    """The choice of each switch under `tuning`; all keys outside of it are resolved."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        """
        config: a config whose keys outside of `tuning` are resolved. The caller must write each
            choice into its `tuning` before it makes the next one, which may depend on it.
        hardware: GPUs and cores of this host.
        """
        self.config = config
        self.hardware = hardware
        self.is_largest = config.tuning.name == "max"
        self.capability = "compute capability {}.{}".format(*hardware.compute_capability)

    def in_order(self) -> dict[str, Callable[[], Choice]]:
        return {
            "precision": self.precision,
            "num_workers": self.num_workers,
            "pin_memory": self.choice,
            "non_blocking": self.choice,
            "copy_stream": lambda: self.choice(self.against_copy_stream()),
            "channels_last": lambda: self.choice(self.against_channels_last(), "convolutions"),
            "cudnn_benchmark": lambda: self.choice(self.against_timing()),
            "tf32": self.choice,
            "triton_kernels": lambda: self.choice(self.against_triton()),
            "optimizer": self.optimizer,
            "compile": self.compile,
            "cuda_graph": self.cuda_graph,  # asks whether the model is compiled
            "buckets": self.buckets,  # asks whether steps are captured
        }

    def choice(self, reasons_against: Iterable[str] = (), reason: str = "") -> Choice:
        """On, for a reason; off without a GPU, or for the first reason against it."""
        if self.config.device != "cuda":
            return False, "no GPU"
        for against in reasons_against:
            return False, against
        return True, reason

    def precision(self) -> Choice:
        has_bf16, why = self.choice(self.against_bf16(), self.capability)
        return "bf16" if has_bf16 else "fp32", why

    def against_bf16(self) -> Iterator[str]:
        if self.hardware.compute_capability < (8, 0):
            yield self.capability
        if "regression" in (self.config.task.name, self.config.data.fitting_task):
            yield "a regression"

    def num_workers(self) -> Choice:
        """Loader processes; for data.decode=gpu, threads that read files."""
        data = self.config.data
        if data.in_memory_bytes() is not None:
            return 0, ""
        if data.decode == "gpu":
            most = READERS
        elif data.class_folders:
            most = 32
        else:
            most = 8
        cores = cores_each(self.config.launch, self.hardware)
        return min(most, cores), f"{cores} cores each"

    def against_copy_stream(self) -> Iterator[str]:
        if self.config.tuning.non_blocking is False:
            yield "non_blocking=false"

    def against_channels_last(self) -> Iterator[str]:
        if not self.config.model.takes_images:
            yield "the model is not known to have convolutions"

    def against_timing(self) -> Iterator[str]:
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
        yield from self.against_threads()
        if (0, 0) < self.hardware.compute_capability < (7, 0):  # the least that Triton takes
            yield self.capability
        yield from self.without_triton()

    def without_triton(self) -> Iterator[str]:
        if why_no_triton():
            yield why_no_triton()

    def optimizer(self) -> Choice:
        if self.config.optimizer.is_custom:
            return "default", "your own class decides"
        is_fused, why = self.choice(self.against_fused())
        return "fused" if is_fused else "foreach", why

    def against_fused(self) -> Iterator[str]:
        if not self.config.optimizer.has_fused:
            yield f"no fused {self.config.optimizer.name}"

    def compile(self) -> Choice:
        # It takes most of a minute, and saves a third of the time of a large model's step.
        if self.is_largest:
            return self.choice(self.against_compiling(), "tuning=max")
        reasons = chain(self.against_compiling(), self.against_waiting_for_compilation())
        return self.choice(reasons, "long steps")

    def against_compiling(self) -> Iterator[str]:
        if self.config.mode != "train":
            yield "an evaluation"
        yield from self.without_triton()
        yield from self.against_threads()
        if self.config.strategy.sync_bn:
            yield "strategy.sync_bn"
        if self.config.deterministic:
            yield "deterministic=true"
        yield from self.against_shapes()

    def against_waiting_for_compilation(self) -> Iterator[str]:
        steps = self.config.train.max_steps
        if not self.config.model.worth_compiling():
            yield "the model is not known to be large"
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
        return self.choice(self.against_capturing(), why)

    def against_capturing(self) -> Iterator[str]:
        config = self.config
        # A compiled step is often shorter than its launches take the host. Batches of a data set of
        # your own may differ in shape.
        is_compiled = config.tuning.compile and config.model.worth_compiling()
        may_pay = is_compiled and not config.data.is_custom
        if not (self.is_largest or is_launch_bound(config) or may_pay):
            yield "neither a small built-in model nor a compiled one"
        # It may do what a capture forbids: ddp_train.all_gather reads sizes from the device.
        if config.task.is_custom:
            yield "a task of your own"
        for key in capture_blockers(config):
            yield f"because of {key}"

    def buckets(self) -> Choice:
        """Buckets of gradients, each with a compiled graph of its own.

        Kernel by kernel one is the fastest: the host launches each graph by itself. Captured, where
        the exchange is a large part of a step, to hide it saves more than a few cuts cost
        (docs/inside/benchmarks/buckets.md).
        """
        has_fewer, why = self.choice(self.against_fewer_buckets(), "NVLink")
        if not has_fewer:
            return "default", why
        return "by_flops" if self.config.tuning.cuda_graph else "one", why

    def against_fewer_buckets(self) -> Iterator[str]:
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
    """The reason why the size of DDP's buckets makes no difference; "" if it makes one.

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
    if most == 1:
        return "one process exchanges nothing"
    return ""


def is_launch_bound(config: Config) -> bool:
    """Tell whether a GPU runs the model's kernels faster than a host launches them.

    All keys outside of `tuning` are resolved.
    """
    parts = config.train.accumulation_steps * config.process_count
    # There are 0 processes where a GPU is asked for and there is none.
    samples = config.train.global_batch_size / max(1, parts)
    return config.model.is_launch_bound(samples * config.data.length)
