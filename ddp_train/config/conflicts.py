"""Which performance switches contradict each other, the hardware or the rest of the config."""

from __future__ import annotations

import shutil

from ddp_train.config.auto import FUSED, IN_MEMORY, OWN_GRAPHS, capture_blockers
from ddp_train.config.hardware import Hardware
from ddp_train.config.schema import Config
from ddp_train.distributed.world import World


def problems(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """As `check` reports them. asked: what the user wrote; config: after `resolve`."""
    tuning, found = config.tuning, []
    if tuning.precision == "fp16" and config.device == "cpu":
        found.append("tuning.precision=fp16: needs a GPU; use tuning.precision=bf16 or fp32 on CPU")
    if tuning.precision == "bf16" and config.device == "cuda" and (0, 0) < hardware.compute_capability < (8, 0):
        found.append(f"tuning.precision=bf16: {hardware.gpu_name} has no bfloat16 units; use tuning.precision=fp16")
    if config.deterministic and tuning.cudnn_benchmark:
        found.append(
            "tuning.cudnn_benchmark=true: picks algorithms by timing, which deterministic=true forbids; "
            "drop one of them"
        )
    if tuning.compile and config.strategy.name == "dp":
        found.append(
            "tuning.compile=true: DataParallel's replicas would all run the compiled model of the first GPU; "
            "use strategy=ddp, or tuning.compile=false"
        )
    if tuning.compile and tuning.compile_mode in OWN_GRAPHS and config.train.accumulation_steps > 1:
        found.append(
            f"tuning.compile_mode={tuning.compile_mode}: its CUDA graphs write over gradients that others are to be "
            "added to (pytorch#169545); use default or max-autotune-no-cudagraphs, or train.accumulation_steps=1"
        )
    if tuning.cuda_graph and config.device == "cuda":
        found += [
            f"tuning.cuda_graph=true: needs {key}={rule}; or use tuning.cuda_graph=false"
            for key, rule in capture_blockers(config).items()
        ]
    if getattr(config.data, "loader", "host") == "device":
        if config.data.name not in IN_MEMORY:
            found.append(f"data.loader=device: data={config.data.name} is not held in memory; use data.loader=host")
        elif tuning.num_workers:
            found.append(
                f"tuning.num_workers={tuning.num_workers}: data.loader=device has no use for loader processes; "
                "use tuning.num_workers=0, or data.loader=host"
            )
    if tuning.optimizer == "fused" and config.optimizer.name not in FUSED:
        found.append(
            f"tuning.optimizer=fused: torch has no fused {config.optimizer.name}; use tuning.optimizer=foreach"
        )
    if (tuning.compile or getattr(config.model, "fused", False)) and config.device == "cpu" and not shutil.which("g++"):
        key = "tuning.compile" if tuning.compile else "model.fused"
        found.append(f"{key}=true: torch.compile needs a C++ compiler on CPU and there is no g++; install one")
    return found
