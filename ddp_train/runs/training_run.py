"""One run on one process: opens the data, resumes, trains or evaluates, and sums up."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddp_train.assembly import fine_tuning, metrics, setup
from ddp_train.assembly.checkpoint_model import facts_of_model, find_checkpoint
from ddp_train.assembly.data_sets import common_digests, open_datasets, plan_digests, scored_digests
from ddp_train.checkpoints import averaged_weights, mirror_run, reader
from ddp_train.checkpoints.checkpoint_hook import CheckpointHook
from ddp_train.checkpoints.mirror import Mirror, Mirroring
from ddp_train.checkpoints.writer import Writer
from ddp_train.config.freeze import to_values
from ddp_train.config.user_code import build_hooks, build_trackers
from ddp_train.data.batch import Batch
from ddp_train.data.datasets import BatchSource, check_same_data
from ddp_train.data.splits import Splits
from ddp_train.distributed.environment import changes_of_number, hosts_follow, lost_rank
from ddp_train.distributed.process_group import Store, from_leader, local_leader_first, set_buffers
from ddp_train.engine.display_hooks import SAMPLE, SampleHook, tensorboard_details
from ddp_train.engine.loop import Evaluation, Job, fit
from ddp_train.engine.metrics_hook import MetricsHook
from ddp_train.engine.profile_hook import profile_hooks
from ddp_train.engine.rehearsal import rehearse
from ddp_train.engine.resize_hook import ResizeHook, changes_of_hosts
from ddp_train.engine.scoring import score_with_average
from ddp_train.engine.selection_hook import SelectionHook
from ddp_train.engine.step_observers import ReportedHook
from ddp_train.engine.user_hooks import OwnHooks
from ddp_train.models.initial_weights import Origin, describe_origin
from ddp_train.models.zoo import parameter_counts
from ddp_train.options.custom import hooks_of
from ddp_train.performance.switches import set_garbage_collection, set_process_flags
from ddp_train.recovery.just_in_time import RecoveryHook
from ddp_train.recovery.lost_host import saver_of
from ddp_train.resilience import lost_hosts
from ddp_train.resilience.heartbeat import StatusBoard
from ddp_train.resilience.preemption import StopController
from ddp_train.runs import display_facts
from ddp_train.runs.context import RunContext
from ddp_train.runs.inference_run import Inference
from ddp_train.runs.plan_report import plan_rows, selects_by_test
from ddp_train.runs.summary import Scores
from ddp_train.runs.summary import write as write_summary
from ddp_train.telemetry.hardware_monitor import hardware_monitor_for
from ddp_train.telemetry.metrics_log import MetricsFile
from ddp_train.telemetry.rates import Rates
from ddp_train.telemetry.trackers.scalars import plain_values
from ddp_train.telemetry.trackers.tracker import TrackedRun, Tracker
from ddp_train.telemetry.trackers.tracking import Tracking, open_trackers
from ddp_train.text import counted


@dataclasses.dataclass(frozen=True)
class Run(RunContext):
    """One run on one process. What its methods build is gone when `execute` returns: DDP objects
    must be collected before their process group is closed."""

    store: Store | None
    """The key-value store that all processes share; None without a process group."""
    leave: Callable[[int], Any]
    """Ends the process with an exit code, for a stop on which the ranks cannot agree."""
    board: StatusBoard | None = None
    """Of our own launcher; None under torchrun."""

    def execute(self) -> bool:
        """Trains or evaluates. Returns whether the run is completed; if not, it was stopped and
        saved."""
        set_process_flags(
            threads=int(self.config.launch.threads_per_process),
            deterministic=bool(self.config.deterministic),
            **setup.keys_taken_by(set_process_flags, self.config.tuning),
        )
        use = Inference(self.config, self.world, self.device, self.status, self.display)
        if self.config.mode == "export":  # it reads no data
            self.publish(use.export())
            return True
        self.status.phase = "data set"
        sources = self.open_data()
        set_garbage_collection(self.config.tuning.gc_freeze)
        self.status.phase = "build"
        if self.config.uses_trained:
            if self.config.mode == "evaluate":
                summary = use.evaluate(sources)
            else:
                summary = use.predict(sources)
            self.publish(summary)
        else:
            if note := mirror_run.fetch(self.config, self.world, self.device, self.status):
                self.display.line(note)
            found = find_checkpoint(self.config, self.world, self.device)
            launch = self.config.launch
            with open_trackers(
                self.trackers(), launch.grace_seconds, launch.timeout_seconds
            ) as tracking:
                summary = self.train(sources, found, tracking)
                if summary["status"] == "completed" or not self.status.goes_on:
                    self.publish(summary)
                tracking.finish(summary)
        return summary["status"] == "completed"

    def open_data(self) -> Splits:
        """One process of each host downloads, or writes an index; the others wait for it."""
        writes = self.config.data.writes_files()
        with local_leader_first(self.world, self.device) if writes else contextlib.nullcontext():
            return open_datasets(self.config, downloads=self.world.is_local_leader)

    def scored_batches(self, source: BatchSource) -> Iterator[Batch]:
        return setup.scored_batches(self.config, source, self.device)

    def trackers(self) -> dict[str, Tracker]:
        """Trackers by their names, on rank 0 alone."""
        if self.world.is_leader:
            return build_trackers(self.config.tracker.classes)
        return {}

    # --- training ---------------------------------------------------------------------------------

    def train(self, sources: Splits, found: Path | None, tracking: Tracking) -> dict[str, Any]:
        """From step 0, or from a checkpoint, to the end or to an agreed stop. Returns the
        summary."""
        config = self.config
        device = self.device
        data_digests = common_digests(sources, sources.train, device)
        origin = reader.read_manifest(found) if found else {}
        first_step = origin.get("step", 0)
        hooks_owed = bool(origin.get("hooks_owed"))
        strategy = setup.build_strategy(config, self.world, device)
        module = setup.build_module(config, sources[0], strategy, device)
        begun = None if found else fine_tuning.begin(config, module.model, self.world, device)
        setup.try_own_task(config, module, sources.train, device)
        metrics.check_metrics(
            config, module, sources, self.scored_batches, config.train.ema_decay is not None
        )
        job = setup.build_job(
            config, self.world, device, module, strategy, sources, self.status, first_step
        )
        log = MetricsFile(self.run_dir, self.world.is_leader, first_step - hooks_owed)
        record = MetricsHook(
            self.display,
            log,
            hardware_monitor_for(device, all_gpus=config.strategy.spreads_over_gpus),
            epochs=config.train.epochs,
            log_every_steps=config.train.log_every_steps,
            evaluate_every_epochs=config.train.evaluate_every_epochs,
            split=sources.scored[0],
            rates=display_facts.build_rates(config, self.world, device, job, sources.train),
        )
        select = metrics.build_selection(config, metrics.directions(module), sources, record)
        data_digests |= plan_digests(job.plan, device)
        paths = [hook.target for hook in hooks_of(config.hooks).values()]
        own = OwnHooks(build_hooks(config.hooks, job, self.run_dir, self.world), paths)
        if found:
            self.restore(found, job, record, select, own, data_digests)
            hooks_owed = hooks_owed or record.owes_score
        job.stepper.continue_from(first_step)
        self.status.step = first_step
        trained = list(fine_tuning.trained_parameters(config, module))
        facts = {
            "data_digests": data_digests,
            "trained": trained,
            **facts_of_model(config, sources.train, module.task),
        }
        facts["scored_digests"] = scored_digests(sources, origin.get("scored_digests", {}))
        facts["begun_with"] = dataclasses.asdict(begun) if begun else origin.get("begun_with")
        save = self.checkpoint_hook(record, select, own, facts)
        self.start_trackers(tracking, log, first_step)
        details = []
        if config.tracker.details:
            details = tensorboard_details(
                tracking.threads,
                module.model,
                lambda: setup.first_batch(config, job.plan, sources[0], device),
            )
        unfreeze = [ReportedHook(hook, self.status, "unfreeze") for hook in job.hooks]
        job.hooks = [
            ReportedHook(record, self.status, "record"),
            ReportedHook(select, self.status, "record"),
            *(
                ReportedHook(one, self.status, "hook") for one in own.acting
            ),  # before their state is saved
            ReportedHook(save, self.status, "checkpoint"),
            *details,
            *unfreeze,
        ]
        write = display_facts.text_writer(config, sources.train)
        if write and self.world.is_leader:
            sample = SampleHook(write, self.display, self.run_dir / SAMPLE)
            job.hooks = [*job.hooks, ReportedHook(sample, self.status, "sample")]
        path = self.run_dir / "profile" / f"rank_{self.world.rank}"
        traced = profile_hooks(config.train.profile_steps, job, path, device, self.display)
        job.hooks = [*job.hooks, *(ReportedHook(hook, self.status, "profile") for hook in traced)]
        saver = saver_of(
            job, save, self.run_dir, self.world, self.status, self.board, config.host_range
        )
        of_hosts = bool(config.host_range)
        changes = changes_of_number()
        lost = from_leader(lost_hosts.noted(self.run_dir), device) if of_hosts else lost_rank()
        if lost:
            job.hooks = [
                *job.hooks,
                RecoveryHook(record, lost, first_step, partial(lost_hosts.forget, self.run_dir)),
            ]
        if of_hosts and found:
            changes = changes_of_hosts(
                record, lost, origin.get("world_size", self.world.size), self.world.size, device
            )
        if changes:
            job.hooks = [ResizeHook(record, changes, first_step, device), *job.hooks]
        job.stop = job.evaluation.stop = StopController()
        if of_hosts:
            job.stop.others_follow = hosts_follow
        test = job.evaluation
        if sources.validation is not None:
            test = setup.build_evaluation(
                config, self.world, device, module, strategy, sources.test, self.status
            )
            test.stop = job.stop
        self.announce(job, sources, select, record.rates, begun)
        offer = saver.offered(job, hooks_owed) if saver else contextlib.nullcontext()
        scores = self.fit(job, record, select, own, test, offer, hooks_owed, save.writer)
        summary = self.summaries.of_training(job, record, select, scores, test)
        for one in (job.evaluation, test, job.stepper):
            one.close()
        return summary

    def restore(
        self,
        found: Path,
        job: Job,
        record: MetricsHook,
        select: SelectionHook,
        own: OwnHooks,
        data_digests: dict[str, str],
    ) -> None:
        """Weights, buffers of every rank, optimizer and counters, from a checkpoint."""
        data = self.config.data
        if self.run_dir in found.parents:
            then = reader.read_manifest(found).get("data_digests", {})
            check_same_data(data.name, getattr(data, "root", None), then, data_digests)
        training = reader.load_training(found)
        note = averaged_weights.restore(
            found, training, job.stepper.average, job.module, self.world.rank
        )
        if note:
            self.display.line(note)
        reader.load_model(found, job.module.model)
        if len(training["buffers"]) == self.world.size > 1:
            set_buffers(job.module, training["buffers"][self.world.rank])
        job.stepper.load_state(training)
        record.load_state(training["record"])
        for note in own.load_state(training.get("hooks", [])):  # older checkpoints have none
            self.display.line(note)
        if (
            self.run_dir in found.parents
        ):  # another run's may be of other data, and its checkpoints are not here
            select.load_state(training.get("selection", {}))  # older checkpoints have none

    def checkpoint_hook(
        self, record: MetricsHook, select: SelectionHook, own: OwnHooks, facts: dict[str, Any]
    ) -> CheckpointHook:
        """facts: of data and model, for every manifest."""
        section = self.config.checkpoint
        writer = None
        if self.world.is_leader:
            selection = select.best.selection if section.best else None
            mirroring = Mirroring(Mirror(section.mirror), self.run_dir) if section.mirror else None
            writer = Writer(
                self.run_dir, section.keep, selection, self.status.set_saving, mirroring
            )
        manifest = {
            "config": to_values(self.config),
            "world_size": self.world.size,
            "torch": torch.__version__,
            **facts,
            "best_by": dataclasses.asdict(select.best.selection),
        }
        return CheckpointHook(
            writer,
            record,
            manifest,
            section.every_steps,
            section.every_minutes,
            section.best,
            more_state=lambda: {"selection": select.state(), "hooks": own.state()},
        )

    def start_trackers(self, tracking: Tracking, log: MetricsFile, first_step: int) -> None:
        config = self.config
        hyperparameters = plain_values(
            {name: value for name, value in to_values(config).items() if name != "reasons"}
        )
        run = TrackedRun(
            self.run_dir, config.name, config.tracker.project, hyperparameters, first_step
        )
        tracking.start(run, log.kept)
        log.listeners.append(tracking.write)

    def announce(
        self, job: Job, sources: Splits, select: SelectionHook, rates: Rates, begun: Origin | None
    ) -> None:
        """Shows the plan, and the progress bar. begun: with which weights; None: with drawn or
        resumed ones."""
        if self.world.is_leader:
            config = self.config
            validation = sources.validation
            counts = parameter_counts(job.module.model)
            optimizer = job.stepper.optimizer
            lr = optimizer.defaults.get("lr", job.stepper.base_lrs[0])
            warmup = setup.warmup_steps(config.schedule, job.plan)
            validating = None if validation is None else len(validation)
            task = job.module.task
            done = job.step
            facts = {
                "trained": counts["trained"],
                "begun": begun and describe_origin(begun),
                "optimizer": optimizer,
            }
            rows = plan_rows(
                config, job.plan, task, counts["all"], lr, warmup, done, validating, rates, **facts
            )
            self.display.plan(rows)
            advice = display_facts.advice(config, job.module, sources.train)
            for line in [*advice, *selects_by_test(config, validation is not None)]:
                self.display.line(line)
        select.stop_if_due(job)
        if job.step >= job.plan.steps:
            early = select.stopped_early or {"reason": f"{job.plan.steps:,} were asked for"}
            self.display.line(
                f"nothing is left to train: {counted(job.step, 'step')} done, {early['reason']}"
            )
        self.display.start(job.plan.steps, lambda: job.step)

    def fit(
        self,
        job: Job,
        record: MetricsHook,
        select: SelectionHook,
        own: OwnHooks,
        test: Evaluation,
        offer: AbstractContextManager[None],
        hooks_owed: bool,
        writer: Writer | None,
    ) -> Scores | None:
        """Trains; a signal stops all ranks after one and the same step. Returns the scores of the
        weights that the run ends with, None if stopped. offer: to save if a peer dies. hooks_owed:
        those of `job.step` have not acted. writer: of checkpoints, on rank 0."""
        record.start_clocks(job.step)
        connection = self.store.clone() if self.store else None
        patience = self.config.launch.grace_seconds / 2
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(
                    job.stop.listening(self.status, self.world, connection, patience, self.leave)
                )
                stack.enter_context(own.entered())
                stack.push(self._leave_hooks)
                stack.enter_context(offer)
                if self.config.tuning.rehearse:
                    rehearse(job)
                    record.start_clocks(job.step)
                if hooks_owed:
                    for hook in job.hooks:
                        hook.act(job)
                fit(job)
                stopped = job.step < job.plan.steps
                scores = None if stopped else self.final_scores(job, record, select, test)
                is_over = mirror_run.finish(
                    writer and writer.mirroring, self.config, job.stop, self.status, self.device
                )
                return scores if is_over else None
        finally:
            self.display.stop()

    def _leave_hooks(self, kind: type[BaseException] | None, *_: object) -> None:
        """Before they are left: an error is still that of the phase in which it was raised."""
        if kind is None:
            self.status.phase = "hook"

    def final_scores(
        self, job: Job, record: MetricsHook, select: SelectionHook, test: Evaluation
    ) -> Scores | None:
        """None if an evaluation was stopped."""
        # Without a score at the end, nothing was left to train: the run was complete already.
        score = record.score or score_with_average(job.evaluation, job.stepper.average)
        if score and not record.score:  # or a stop cut its last evaluation off
            record.write_score(job, record.split, score)
            select.best.see(job.step, score.metrics)
        if score is None or test is job.evaluation:
            return score and {"test": score}
        tested = score_with_average(test, job.stepper.average)
        if tested is None:
            return None
        record.write_score(job, "test", tested)
        return {"validation": score, "test": tested}

    def publish(self, summary: dict[str, Any]) -> None:
        if self.world.is_leader:
            write_summary(self.run_dir, summary)
            self.display.summary(summary, self.run_dir, self.config.words_to_resume)
