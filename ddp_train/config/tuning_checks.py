"""Checks of performance switches against each other and the hardware."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from ddp_train.config.capture import OWN_GRAPHS, capture_blockers
from ddp_train.config.packages import how_to_install_extra, is_installed
from ddp_train.hardware import Hardware, why_no_triton
from ddp_train.options.problem import Problem
from ddp_train.options.schema import Config, RequestedRun


def problems(run: RequestedRun) -> Iterator[Problem]:
    config = run.config
    yield from _precision(config, run.hardware)
    if config.deterministic and config.tuning.cudnn_benchmark:
        yield Problem(
            "tuning.cudnn_benchmark=true",
            "would choose algorithms by their speed, which deterministic=true forbids",
            "give one of them",
        )
    yield from _compile(config)
    if config.device == "cuda":
        yield from _on_gpus(config)


def _precision(config: Config, hardware: Hardware) -> Iterator[Problem]:
    precision = config.tuning.precision
    if precision == "fp16" and config.device == "cpu":
        yield Problem(
            "tuning.precision=fp16", "needs a GPU", "use tuning.precision=bf16 or fp32 on CPU"
        )
    has_no_bf16 = (0, 0) < hardware.compute_capability < (8, 0)
    if precision == "bf16" and config.device == "cuda" and has_no_bf16:
        yield Problem(
            "tuning.precision=bf16",
            f"{hardware.gpu_name} has no bfloat16 units",
            "use tuning.precision=fp16",
        )


def _compile(config: Config) -> Iterator[Problem]:
    tuning = config.tuning
    if tuning.compile and config.strategy.spreads_over_gpus:
        yield Problem(
            "tuning.compile=true",
            "DataParallel's replicas would all run the compiled model of the first GPU",
            "use strategy=ddp, or tuning.compile=false",
        )
    captures = tuning.compile and tuning.compile_mode in OWN_GRAPHS
    if captures and config.train.accumulation_steps > 1:
        yield Problem(
            f"tuning.compile_mode={tuning.compile_mode}",
            "the CUDA graphs of this mode overwrite accumulated gradients (pytorch#169545)",
            "use tuning.compile_mode=default or max-autotune-no-cudagraphs, or"
            " train.accumulation_steps=1",
        )
    switches = {"tuning.compile": tuning.compile, "model.fused": config.model.fused}
    compiling = [key for key, is_on in switches.items() if is_on]
    if compiling and config.device == "cpu" and not shutil.which("g++"):
        without = " ".join(f"{key}=false" for key in compiling)
        yield Problem(
            f"{compiling[0]}=true",
            "on CPU torch.compile needs g++, which is not installed",
            f"install g++, or use {without}",
        )


def _on_gpus(config: Config) -> Iterator[Problem]:
    tuning = config.tuning
    why_not = why_no_triton()
    for name in ("compile", "triton_kernels"):
        if why_not and getattr(tuning, name):
            yield Problem(
                f"tuning.{name}=true",
                f"needs Triton, a C compiler and Python.h, and this host has {why_not}",
                f"install what is missing, or use tuning.{name}=false",
            )
    if tuning.cuda_graph:
        for name, rule in capture_blockers(config).items():
            yield Problem(
                "tuning.cuda_graph=true",
                f"needs {name}={rule}",
                "set that, or use tuning.cuda_graph=false",
            )
    if tuning.rehearse:
        yield from _needs("rehearse", _lacking_to_rehearse(config))
    if tuning.conv_sums:
        yield from _needs("conv_sums", _lacking_for_conv_sums(config))


def _needs(name: str, lacking: Iterator[str]) -> Iterator[Problem]:
    for requirement in lacking:
        yield Problem(
            f"tuning.{name}=true", f"needs {requirement}", f"otherwise use tuning.{name}=false"
        )


def _lacking_to_rehearse(config: Config) -> Iterator[str]:
    if not config.tuning.cuda_graph:
        yield "tuning.cuda_graph=true"
    if config.train.ema_decay:
        yield "train.ema_decay=null"


def _lacking_for_conv_sums(config: Config) -> Iterator[str]:
    tuning = config.tuning
    if not is_installed("cudnn"):
        yield f"the package nvidia-cudnn-frontend ({how_to_install_extra('cudnn')})"
    if not tuning.compile:
        yield "tuning.compile=true"
    if tuning.precision not in ("fp16", "bf16"):
        yield "tuning.precision=fp16 or bf16"
    if not tuning.channels_last:
        yield "tuning.channels_last=true"
    if config.deterministic:
        yield "deterministic=false, since cuDNN chooses these kernels by their speed"
