"""The content of summary.json, in which a run is summed up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_train.assembly import metrics
from ddp_train.checkpoints import reader
from ddp_train.checkpoints.scored_checkpoint import score_checkpoint
from ddp_train.config.freeze import facts_of_start, run_facts
from ddp_train.distributed.environment import launcher_pid
from ddp_train.distributed.process_group import from_leader
from ddp_train.engine.loop import Evaluation, Job
from ddp_train.engine.metrics_hook import MetricsHook
from ddp_train.engine.selection_hook import SelectionHook
from ddp_train.errors import WriteError
from ddp_train.models.freezing import parameter_counts
from ddp_train.resilience.failure_report import SUMMARY
from ddp_train.resilience.whole_files import RAISE_LIMIT, is_over_limit, write_json
from ddp_train.runs.context import RunContext
from ddp_train.scored_sets import TEST, VALIDATION, of_kind
from ddp_train.tasks.score import Score
from ddp_train.tasks.task import ModelWithTask

Scores = dict[str, Score]
"""Scores by the name of the split."""


def write(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write summary.json. Raises WriteError."""
    try:
        write_json(run_dir / SUMMARY, summary)
    except OSError as error:
        remedy = "free some space, or make the folder writable"
        if is_over_limit(error):
            remedy = RAISE_LIMIT
        remedy += ", then run the same command again, which only writes this file"
        raise WriteError(f"{run_dir}: summary.json cannot be written: {error}", remedy) from error


def summary_of_training(
    run: RunContext,
    job: Job,
    metrics_hook: MetricsHook,
    selection_hook: SelectionHook,
    scores: Scores | None,
    test_evaluations: Mapping[str, Evaluation],
) -> dict[str, Any]:
    """The content of summary.json for a run that trained.

    A collective: the best checkpoint is loaded and scored on the test sets, if another set found
    it.

    scores: of the final weights; None if the run was stopped.
    test_evaluations: score the test sets, for the best checkpoint.
    """
    samples_seen = job.plan.samples_seen(job.step)
    seconds = metrics_hook.seconds
    training_seconds = seconds
    if scores:
        training_seconds = sum(metrics_hook.epoch_seconds)
    speeds = metrics_hook.rates.of(samples_seen, metrics_hook.units, training_seconds)
    resizes = []
    for line in metrics_hook.resizes:
        resizes.append({name: value for name, value in line.items() if name != "kind"})
    best = selection_hook.best.as_dict()
    if scores:
        best = _best(run, job, selection_hook, scores, test_evaluations)
    return summary_of_scores(run, scores, job.module) | {
        "steps": job.step,
        "stopped_early": selection_hook.stopped_early,
        "train": {"loss": metrics_hook.last_epoch_loss},
        "best": best,
        "checkpoint": reader.existing(run.run_dir, job.step),
        "seconds": seconds,
        "samples_seen": samples_seen,
        "epoch_seconds": metrics_hook.epoch_seconds,
        "samples_per_second": None,
        **speeds,
        "samples_per_second_with_evaluation": samples_seen / seconds if seconds else None,
        "figures": metrics_hook.hardware.summary(),
        "recoveries": metrics_hook.recoveries,
        "resizes": resizes,
        "steps_skipped": job.stepper.check_finite.skipped,
        "steps_redone": _steps_redone(run, metrics_hook),
    }


def _steps_redone(run: RunContext, metrics_hook: MetricsHook) -> int | None:
    """The steps that were computed twice; None if torchrun has restarted the run, which says
    nothing of what was lost."""
    is_watched = launcher_pid() is not None or run.config.host_range is not None
    if run.world.attempt and not is_watched:
        return None
    return sum(recovery["steps_redone"] for recovery in metrics_hook.recoveries)


def _best(
    run: RunContext,
    job: Job,
    selection_hook: SelectionHook,
    scores: Scores,
    test_evaluations: Mapping[str, Evaluation],
) -> dict[str, Any] | None:
    """The best evaluation, and its checkpoint if that is kept.

    It has the scores of the test sets too, if another set has found the best. A collective.
    """
    best = selection_hook.best.as_dict()
    if best is None:
        return None
    # From rank 0: a file server may show it to the others later.
    checkpoint = from_leader(reader.existing(run.run_dir, best["step"]), run.device)
    best["checkpoint"] = checkpoint
    if of_kind(VALIDATION, scores) and run.config.checkpoint.best:
        test_scores = None
        if best["step"] == job.step:
            test_scores = {name: scores[name] for name in test_evaluations}
        elif checkpoint:
            test_scores = score_checkpoint(Path(checkpoint), job.module.model, test_evaluations)
        for name in test_evaluations:
            best[name] = test_scores[name].as_dict() if test_scores else None
    return best


def summary_of_scores(
    run: RunContext, scores: Scores | None, module: ModelWithTask
) -> dict[str, Any]:
    """The content of summary.json that all runs have which score a model.

    scores: None if the run was stopped.
    """
    if scores is None:
        status = "preempted"
        scores = {}
    else:
        status = "completed"
    by_split = {split: score.as_dict() for split, score in scores.items()}
    better = {}
    if scores:
        directions = metrics.directions(module)
        names = next(iter(scores.values())).metrics
        better = {name: directions.get(name) for name in names}
    return {
        **summary_of_model(run, status, module.model),
        "better": better,
        VALIDATION: None,
        TEST: None,
        **by_split,
    }


def summary_of_model(run: RunContext, status: str, model: nn.Module) -> dict[str, Any]:
    """The content of summary.json that all runs have."""
    device_name = "cpu"
    if run.config.device == "cuda":
        device_name = torch.cuda.get_device_name(run.device)
    return {
        "status": status,
        **run_facts(run.config),
        **facts_of_start(run.run_dir),
        "parameters": parameter_counts(model),
        "device_name": device_name,
        "torch": torch.__version__,
    }
