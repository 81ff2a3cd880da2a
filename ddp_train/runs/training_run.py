"""One run on one process: opens the data, trains or uses a trained model, and sums up."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from ddp_train.assembly.arguments import keys_taken_by
from ddp_train.assembly.checkpoint_model import find_checkpoint
from ddp_train.assembly.data_sets import open_datasets
from ddp_train.config.user_code import build_trackers
from ddp_train.data.splits import Splits
from ddp_train.distributed.process_group import local_leader_first
from ddp_train.performance.switches import set_garbage_collection, set_process_flags
from ddp_train.recovery.kept_checkpoint import save_step_of_last_attempt
from ddp_train.runs import mirror_run
from ddp_train.runs.context import RunContext
from ddp_train.runs.inference_run import InferenceRun
from ddp_train.runs.summary import write as write_summary
from ddp_train.runs.training import StartingPoint, Training
from ddp_train.telemetry.trackers.tracker import Tracker
from ddp_train.telemetry.trackers.tracking import Tracking, open_trackers


@dataclass(frozen=True)
class TrainingRun(RunContext):
    """One run on one process.

    What its methods build is gone when `execute` returns: DDP objects must be collected before
    their process group is closed.
    """

    def execute(self) -> bool:
        """Do what the config's mode asks for; False if the run was stopped and saved."""
        set_process_flags(
            threads=int(self.config.launch.threads_per_process),
            deterministic=bool(self.config.deterministic),
            **keys_taken_by(set_process_flags, self.config.tuning),
        )
        if self.config.mode == "train":
            summary = self.train(self.open_data())
        else:
            summary = self.use_trained_model()
            self.publish(summary)
        return summary["status"] == "completed"

    def use_trained_model(self) -> dict[str, Any]:
        """Evaluate, predict or export. Returns the summary."""
        inference = InferenceRun(self)
        if self.config.mode == "export":  # it reads no data
            return inference.export()
        splits = self.open_data()
        if self.config.mode == "evaluate":
            return inference.evaluate(splits)
        return inference.predict(splits)

    def open_data(self) -> Splits:
        """The data sets of the run.

        One process of each host downloads, or writes an index; the others wait for it.
        """
        self.status.phase = "data set"
        turns = contextlib.nullcontext()
        if self.config.data.writes_files():
            turns = local_leader_first(self.world, self.device)
        with turns:
            splits = open_datasets(self.config, self.world.is_local_leader, self.status)
        set_garbage_collection(self.config.tuning.gc_freeze)
        self.status.phase = "build"
        return splits

    def train(self, splits: Splits) -> dict[str, Any]:
        """Train from step 0, or from a checkpoint, to the end or to an agreed stop.

        Returns the summary, which is published unless later processes continue the run.
        """
        memory = self.worker.kept_memory
        save_step_of_last_attempt(memory, self.run_dir, self.world.is_leader, self.device)
        note = mirror_run.fetch(self.config, self.world, self.device, self.status)
        if note:
            self.display.line(note)
        start = StartingPoint.at(find_checkpoint(self.config, self.world, self.device))
        launch = self.config.launch
        with open_trackers(
            self.trackers(), launch.grace_seconds, launch.timeout_seconds
        ) as tracking:
            summary = self._train_from(start, splits, tracking)
            if summary["status"] == "completed" or not self.status.goes_on:
                self.publish(summary)
            tracking.finish(summary)
        return summary

    def _train_from(
        self, start: StartingPoint, splits: Splits, tracking: Tracking
    ) -> dict[str, Any]:
        training = Training.prepare(self, splits, start)
        training.restore()
        training.attach_hooks(tracking)
        training.announce()
        scores = training.fit()
        summary = training.summary(scores)
        training.close()
        return summary

    def trackers(self) -> dict[str, Tracker]:
        """Trackers by their names, on rank 0 alone."""
        if self.world.is_leader:
            return build_trackers(self.config.tracker.classes)
        return {}

    def publish(self, summary: dict[str, Any]) -> None:
        """Write and show the summary, on rank 0."""
        if self.world.is_leader:
            write_summary(self.run_dir, summary)
            self.display.summary(summary, self.run_dir, self.config.words_to_resume)
