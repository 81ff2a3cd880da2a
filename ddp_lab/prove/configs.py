"""The job as its proof runs it: its own model, loss, data and hooks, on few samples, on CPUs.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_lab.study.trials import NEVER
from ddp_train.options.registry import default_of
from ddp_train.options.schema import Config

HOOKS = "ddp_lab.prove.hooks"
EVERY_STEPS = 2
"""Steps between two checkpoints of a real run."""
CPU_OVERRIDES = (
    "device=cpu",
    "launch.nnodes=1",
    "launch.rdzv_endpoint=null",
    "launch.backend=auto",
)
"""Overrides beside those of the job, so that what is `auto` is chosen for CPUs."""


@dataclass(frozen=True)
class RealRun:
    """One run of a proof by real processes."""

    name: str
    """Name of its folder."""
    processes: int
    hooks: list[Any] = field(default_factory=list)
    """Hooks beside those of the job."""
    resume: str = "auto"
    max_steps: int | None = None
    """None: as many as all real runs of the proof."""
    mode: str = "train"
    in_new_processes: bool = False
    """Not forked: with hashes of texts of their own, as on the next day."""


def for_proof(config: Config, run_dir: Path) -> Config:
    """The resolved config of a job as its proof runs it.

    Global batches have at most prove.samples samples, and an epoch two and a half of them: no
    number of processes divides all of it.
    """
    most_samples = config.prove.samples
    train = replace(
        config.train,
        accumulation_steps=1,
        max_steps=config.prove.steps,
        max_minutes=None,
        epochs=None,
        evaluate_every_epochs=NEVER,
        evaluate_every_steps=None,
        on_non_finite="stop",
        early_stopping=replace(config.train.early_stopping, patience=None),
    )
    data = config.data
    if data.batch_by == "samples" and not data.batch_sampler:
        train = replace(train, global_batch_size=min(train.global_batch_size, most_samples))
    if hasattr(data, "limit"):
        limit = 2 * most_samples + most_samples // 2 + 1
        data = replace(data, limit=min(data.limit or limit, limit))
    return replace(
        config,
        mode="train",
        run_dir=str(run_dir),
        data=data,
        strategy=_exact_strategy(config.strategy),
        tracker=Config().tracker,
        schedule=default_of("schedule", "constant"),
        launch=replace(config.launch, max_restarts=0),
        process_range=None,
        process_counts=[],
        host_range=None,
        train=train,
        checkpoint=replace(
            config.checkpoint,
            every_steps=EVERY_STEPS,
            every_minutes=None,
            keep=NEVER,
            best=False,
            resume="auto",
            which="auto",
            mirror=None,  # it is the job's own
        ),
        tuning=replace(
            config.tuning,
            compile=False,
            cuda_graph=False,
            num_workers=0,
            activation_checkpointing=[],
        ),
    )


def _exact_strategy(strategy: Any) -> Any:
    """The strategy of the job, or DDP, without a hook that rounds what is compared."""
    if not strategy.has_process_group:
        strategy = default_of("strategy", "ddp")
    if getattr(strategy, "comm_hook", "none") != "none":
        strategy = replace(strategy, comm_hook="none")
    return strategy


def config_of_run(config: Config, real_run: RealRun, run_dir: Path) -> Config:
    """The config of one real run. config: as `for_proof` makes it."""
    train = config.train
    if real_run.max_steps is not None:
        train = replace(train, max_steps=real_run.max_steps)
    return replace(
        config,
        mode=real_run.mode,
        run_dir=str(run_dir),
        launch=replace(config.launch, nproc_per_node=real_run.processes, threads_per_process=1),
        checkpoint=replace(config.checkpoint, resume=real_run.resume),
        train=train,
        hooks=[*config.hooks, *real_run.hooks],
    )


def counts_of(config: Config) -> tuple[int, int]:
    """Processes of the run that is interrupted, and another number of them.

    strategy=ordered takes powers of two.
    """
    return (2, 1) if config.strategy.name == "ordered" else (2, 3)
