"""The job as its proof runs it: its own model, loss, data and hooks, on few samples, on CPUs.
Torch-free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_lab.study.trials import NEVER
from ddp_train.options.registry import default_of
from ddp_train.options.schema import Config

HOOKS = "ddp_lab.prove.hooks"
EVERY_STEPS = 2
"""Between two checkpoints of a real run."""
WORDS = ("device=cpu", "launch.nnodes=1", "launch.rdzv_endpoint=null", "launch.backend=auto")
"""Beside those of the job, so that what is `auto` is chosen for CPUs."""


def for_proof(config: Config, run_dir: Path) -> Config:
    """config: resolved. Global batches have at most prove.samples samples, and an epoch two and a
    half of them: no number of processes divides all of it."""
    most = config.prove.samples
    train = config.train
    data = config.data
    if data.batch_by == "samples":
        train = replace(train, global_batch_size=min(train.global_batch_size, most))
    asked = 2 * most + most // 2 + 1
    if hasattr(data, "limit"):
        data = replace(data, limit=min(data.limit or asked, asked))
    strategy = config.strategy
    if not strategy.has_process_group:
        strategy = default_of("strategy", "ddp")
    if getattr(strategy, "comm_hook", "none") != "none":
        strategy = replace(strategy, comm_hook="none")  # it rounds what is compared
    return replace(
        config,
        mode="train",
        run_dir=str(run_dir),
        data=data,
        strategy=strategy,
        tracker=Config().tracker,
        schedule=default_of("schedule", "constant"),
        launch=replace(config.launch, max_restarts=0),
        process_range=None,
        process_counts=[],
        host_range=None,
        train=replace(
            train,
            accumulation_steps=1,
            max_steps=config.prove.steps,
            max_minutes=None,
            epochs=max(config.prove.steps, train.epochs),
            evaluate_every_epochs=NEVER,
            on_non_finite="stop",
            early_stopping=replace(train.early_stopping, patience=None),
        ),
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


def variant(
    config: Config, run_dir: Path, processes: int, hooks: list[Any] | None = None, **more: Any
) -> Config:
    """One run of the proof. hooks: beside those of the job. more: of `checkpoint`, `train` or the
    config itself."""
    launch = replace(config.launch, nproc_per_node=processes, threads_per_process=1)
    checkpoint = replace(
        config.checkpoint, **{name: more.pop(name) for name in ("resume",) if name in more}
    )
    train = replace(
        config.train, **{name: more.pop(name) for name in ("max_steps",) if name in more}
    )
    hooks = [*config.hooks, *(hooks or [])]
    return replace(
        config,
        run_dir=str(run_dir),
        launch=launch,
        checkpoint=checkpoint,
        train=train,
        hooks=hooks,
        **more,
    )


def counts_of(config: Config) -> tuple[int, int]:
    """Of processes: for the run that is interrupted, and another number. strategy=ordered takes
    powers of two."""
    return (2, 1) if config.strategy.name == "ordered" else (2, 3)
