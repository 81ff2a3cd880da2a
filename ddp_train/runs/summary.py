"""What summary.json says of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_train.assembly import metrics
from ddp_train.checkpoints import reader
from ddp_train.checkpoints.scored_checkpoint import score_checkpoint
from ddp_train.config.auto import described
from ddp_train.config.freeze import facts_of_start
from ddp_train.distributed.process_group import from_leader
from ddp_train.engine.loop import Evaluation, Job
from ddp_train.engine.metrics_hook import MetricsHook
from ddp_train.engine.selection_hook import SelectionHook
from ddp_train.errors import WriteError
from ddp_train.models.zoo import parameter_counts
from ddp_train.options.schema import Config
from ddp_train.resilience.failure_report import SUMMARY
from ddp_train.resilience.whole_files import write_json
from ddp_train.tasks.score import Score
from ddp_train.tasks.task import ModelWithTask

Scores = dict[str, Score]
"""By the name of the split."""


def write(run_dir: Path, summary: dict[str, Any]) -> None:
    """Writes summary.json. Raises WriteError."""
    try:
        write_json(run_dir / SUMMARY, summary)
    except OSError as error:
        remedy = (
            "free some space, and give the same command again: nothing is left to train, and the"
            " file is written"
        )
        raise WriteError(f"{run_dir}: summary.json cannot be written: {error}", remedy) from error


@dataclass(frozen=True)
class Summary:
    """Makes the content of summary.json. All processes call it alike: some of it is exchanged."""

    config: Config
    run_dir: Path
    device: str

    def of_training(
        self,
        job: Job,
        record: MetricsHook,
        select: SelectionHook,
        scores: Scores | None,
        test: Evaluation,
    ) -> dict[str, Any]:
        """Of a run that trained."""
        samples_seen = job.plan.samples_seen(job.step)
        seconds = record.seconds
        trained = sum(record.epoch_seconds) if scores else seconds
        return self.of(
            scores,
            job.module,
            steps=job.step,
            stopped_early=select.stopped_early,
            train={"loss": record.last_epoch_loss},
            best=scores and self.best_of(job, select, scores, test),
            checkpoint=reader.existing(self.run_dir, job.step),
            seconds=seconds,
            samples_seen=samples_seen,
            epoch_seconds=record.epoch_seconds,
            **(
                record.rates.of(samples_seen, record.units, trained) or {"samples_per_second": None}
            ),
            samples_per_second_with_evaluation=samples_seen / seconds if seconds else None,
            figures=record.hardware.summary(),
            recoveries=record.recoveries,
            resizes=[{name: one[name] for name in one if name != "kind"} for one in record.resizes],
            steps_redone=sum(one["steps_redone"] for one in record.recoveries),
        )

    def best_of(
        self, job: Job, select: SelectionHook, scores: Scores, test: Evaluation
    ) -> dict[str, Any] | None:
        """The best evaluation, and its checkpoint if that is kept: with the score of the test set,
        if the best was found by another one."""
        best = select.best.as_dict()
        if best is None:
            return None
        # From rank 0: a file server may show it to the others later.
        place = from_leader(reader.existing(self.run_dir, best["step"]), self.device)
        found: dict[str, Any] = {**best, "checkpoint": place}
        if "validation" in scores and self.config.checkpoint.best:
            if best["step"] == job.step:
                found["test"] = scores["test"].as_dict()
            elif place:
                found["test"] = (tested := score_checkpoint(Path(place), test)) and tested.as_dict()
        return found

    def of_use(
        self, model: nn.Module, used: dict[str, Any], seconds: float, **written: dict[str, Any]
    ) -> dict[str, Any]:
        """Of predictions or an export. used: the checkpoint. written: what was made with it."""
        return (
            self.facts("completed", model)
            | {"steps": used["step"], "seconds": seconds, "evaluated": used}
            | written
        )

    def of(self, scores: Scores | None, module: ModelWithTask, **numbers: Any) -> dict[str, Any]:
        """Of a run that scores. scores: None if it was stopped. numbers: further entries."""
        better = metrics.directions(module)
        return {
            **self.facts("completed" if scores else "preempted", module.model),
            **numbers,
            "better": {
                name: better.get(name, "min") for name in (scores["test"].metrics if scores else ())
            },
            "validation": (
                scores["validation"].as_dict() if scores and "validation" in scores else None
            ),
            "test": scores["test"].as_dict() if scores else None,
        }

    def facts(self, status: str, model: nn.Module) -> dict[str, Any]:
        """Of any run."""
        return {
            "status": status,
            **described(self.config),
            **facts_of_start(self.run_dir),
            "parameters": parameter_counts(model),
            "device_name": (
                torch.cuda.get_device_name(self.device) if self.config.device == "cuda" else "cpu"
            ),
            "torch": torch.__version__,
        }
