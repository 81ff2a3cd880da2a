"""Training on one process: how it is prepared and restored, the order of its hooks, its course."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_train.assembly import metrics
from ddp_train.assembly.batches import first_batch
from ddp_train.assembly.checkpoint_model import facts_of_model
from ddp_train.assembly.data_digests import (
    common_digests,
    plan_digests,
    scored_digests,
    warn_of_collate,
)
from ddp_train.assembly.initial_weights import load_named_weights
from ddp_train.assembly.job import JobBuilder
from ddp_train.assembly.model import build_module, try_user_code
from ddp_train.assembly.optimizer import trained_parameters
from ddp_train.assembly.plan import warmup_steps
from ddp_train.assembly.schedule import metric_of, split_of_metric
from ddp_train.assembly.strategy import build_strategy
from ddp_train.checkpoints import reader
from ddp_train.checkpoints.checkpoint_hook import CheckpointHook, SaveTimes
from ddp_train.checkpoints.mirror import Mirror
from ddp_train.checkpoints.mirroring import Mirroring
from ddp_train.checkpoints.training_state import (
    METRICS,
    SCHEDULE,
    SELECTION,
    STREAM,
    USER_HOOKS,
    StatefulHook,
    TrainingState,
)
from ddp_train.checkpoints.writer import Writer
from ddp_train.config.freeze import to_values
from ddp_train.config.user_code import build_hooks
from ddp_train.data.datasets import check_same_data
from ddp_train.data.finite import non_finite_samples
from ddp_train.data.rng import StepSeed
from ddp_train.data.splits import Splits
from ddp_train.data.user_dataset import numbered_stream_of
from ddp_train.distributed.agent import hosts_follow
from ddp_train.distributed.environment import changes_of_number, lost_rank
from ddp_train.distributed.process_group import from_leader, total
from ddp_train.distributed.training_step import CURRENT
from ddp_train.engine.attributes_hook import AttributesHook
from ddp_train.engine.copies_hook import CopiesHook
from ddp_train.engine.display_hooks import SAMPLE, SampleHook, tensorboard_details
from ddp_train.engine.epoch_hook import EpochHook
from ddp_train.engine.hook_context import HookContext
from ddp_train.engine.loop import Evaluation, Hook, Job, fit
from ddp_train.engine.metrics_hook import Intervals, MetricsHook
from ddp_train.engine.noise_hook import NoiseHook
from ddp_train.engine.plateau_hook import PlateauHook
from ddp_train.engine.profile_hook import profile_hooks
from ddp_train.engine.rehearsal import rehearse
from ddp_train.engine.resize_hook import ResizeHook, changes_of_hosts, names_of_change
from ddp_train.engine.scoring import score_sets
from ddp_train.engine.selection_hook import SelectionHook
from ddp_train.engine.step_observers import ReportedHook
from ddp_train.engine.user_hooks import UserHooks
from ddp_train.errors import ConfigError
from ddp_train.models.freezing import parameter_counts
from ddp_train.models.initial_weights import Origin, describe_origin
from ddp_train.optim.schedules.torch_schedules import PlateauSchedule
from ddp_train.options.custom import CustomOption
from ddp_train.options.custom import hooks_of as hooks_named_by
from ddp_train.options.schema import Config
from ddp_train.parallel.sync_batch_norm import cost_of, own_statistics
from ddp_train.plain_state import PLAIN_DATA, problem_of_extra_state, problem_of_state
from ddp_train.recovery.lost_host import (
    OwnNumbers,
    memory_of_host,
    reason_not_kept,
    saving_on_loss,
)
from ddp_train.recovery.recovery_hook import RecoveryHook
from ddp_train.recovery.run_keeper import RunKeeper
from ddp_train.recovery.state_keeper import StateKeeper
from ddp_train.resilience import lost_hosts, peer_check, run_lock
from ddp_train.resilience.kept_memory import KeptMemory
from ddp_train.runs import display_facts, mirror_run
from ddp_train.runs.context import RunContext
from ddp_train.runs.plan_report import PlanFacts, plan_rows, selects_by_test
from ddp_train.runs.summary import Scores, summary_of_training
from ddp_train.telemetry.hardware_monitor import hardware_monitor_for
from ddp_train.telemetry.metrics_log import MetricsFile
from ddp_train.telemetry.trackers.scalars import plain_values
from ddp_train.telemetry.trackers.tracker import TrackedRun
from ddp_train.telemetry.trackers.tracking import Tracking
from ddp_train.text import counted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartingPoint:
    """The step at which training starts: 0, or that of a checkpoint."""

    checkpoint: Path | None = None
    manifest: dict[str, Any] = field(default_factory=dict)
    """Manifest of the checkpoint; empty at step 0."""

    @classmethod
    def at(cls, checkpoint: Path | None) -> StartingPoint:
        if checkpoint is None:
            return cls()
        return cls(checkpoint, reader.read_manifest(checkpoint))

    @property
    def step(self) -> int:
        """Number of optimizer steps that are done."""
        return self.manifest.get("step", 0)

    @property
    def owes_hooks(self) -> bool:
        """True if this step was kept before its hooks had acted."""
        return bool(self.manifest.get("hooks_owed"))


@dataclass
class Training:
    """Everything that one process needs to train one run.

    All processes call its methods in the same order: many of them exchange something.
    """

    run: RunContext
    splits: Splits
    start: StartingPoint
    job: Job
    test_evaluations: dict[str, Evaluation]
    """Score the test sets, by their names; those of `job` score the validation sets if there are
    any."""
    metrics_hook: MetricsHook
    selection_hook: SelectionHook
    plateau_hook: PlateauHook | None
    """None for a schedule that does not follow the evaluations."""
    user_hooks: UserHooks
    origin: Origin | None
    """The weights that training begins with; None for drawn or resumed ones."""
    data_digests: dict[str, str]
    checkpoint_hook: CheckpointHook = field(init=False)
    """Built by `attach_hooks`, when it is known what was restored."""

    @classmethod
    def prepare(cls, run: RunContext, splits: Splits, start: StartingPoint) -> Training:
        """Build everything, with the weights that the config names if there is no checkpoint."""
        config = run.config
        data_digests = common_digests(splits, splits.train, run.device)
        if run.world.size > 1:
            warn_of_collate(splits.train)
        strategy = build_strategy(config, run.world, run.device)
        module = build_module(config, splits.train, strategy, run.device)
        origin = None
        if start.checkpoint is None:
            origin = load_named_weights(config, module.model, run.world, run.device)
        try_user_code(config, module, splits, run.device)
        has_average = config.train.ema_decay is not None
        metrics.check_metrics(config, module, splits, run.device, has_average)
        builder = JobBuilder(config, run.world, run.device, module, strategy, run.status)
        job = builder.build_job(splits, start.step)
        job.stepper.check_finite.non_finite_samples = partial(
            non_finite_samples, splits.train, bool(config.data.mixup or config.data.cutmix)
        )
        if config.host_range:
            job.stop.others_follow = hosts_follow
        metrics_hook = build_metrics_hook(run, splits, start, job)
        better = metrics.directions(module)
        selection_hook = metrics.build_selection(config, better, splits, metrics_hook)
        data_digests |= plan_digests(job.plan, run.device)
        test_evaluations = dict(job.evaluations)
        if splits.validation_sets:
            test_evaluations = builder.build_evaluations(splits.test_sets)
        for evaluation in (*job.evaluations.values(), *test_evaluations.values()):
            evaluation.stop = job.stop
        return cls(
            run=run,
            splits=splits,
            start=start,
            job=job,
            test_evaluations=test_evaluations,
            metrics_hook=metrics_hook,
            selection_hook=selection_hook,
            plateau_hook=build_plateau_hook(config, job),
            user_hooks=build_user_hooks(run, job),
            origin=origin,
            data_digests=data_digests,
        )

    @property
    def owes_hooks(self) -> bool:
        """True if the hooks of `job.step` have yet to act.

        They died with a rank, or a stop request ended the evaluation of that step.
        """
        return self.start.owes_hooks or self.metrics_hook.owes_score

    def restore(self) -> None:
        """Load weights, buffers of every rank, optimizer and counters if there is a checkpoint."""
        if self.start.checkpoint is not None:
            self._load(self.start.checkpoint)
        self.job.stepper.continue_from(self.start.step)
        self.run.status.step = self.start.step

    def _load(self, path: Path) -> None:
        run = self.run
        job = self.job
        is_of_this_run = run.run_dir in path.parents
        if is_of_this_run:
            data = run.config.data
            digests_then = self.start.manifest.get("data_digests", {})
            check_same_data(data.name, getattr(data, "root", None), digests_then, self.data_digests)
        hooks: dict[str, StatefulHook] = {METRICS: self.metrics_hook, USER_HOOKS: self.user_hooks}
        # Another run's may be of other data, and its checkpoints are not here.
        if is_of_this_run:
            hooks[SELECTION] = self.selection_hook
            if job.stream_position:
                hooks[STREAM] = job.stream_position
        if self.plateau_hook:
            hooks[SCHEDULE] = self.plateau_hook
        state = TrainingState.load(path)
        for note in state.apply(path, job, hooks, run.world.rank):
            run.display.line(note)

    def attach_hooks(self, tracking: Tracking) -> None:
        """Build the checkpoint hook, start the trackers, and give the job all of its hooks."""
        self.checkpoint_hook = build_checkpoint_hook(self)
        self.metrics_hook.hooks_log = bool(self.user_hooks.acting)
        if self.run.world.is_leader:
            self.job.media.tracking = tracking
        start_trackers(self.run, tracking, self.metrics_hook.metrics, self.start.step)
        self.job.hooks = hooks_of(self, tracking)

    def announce(self) -> None:
        """Show the plan and the progress bar, and whether anything is left to train."""
        run = self.run
        job = self.job
        if run.world.is_leader:
            run.display.plan(plan_rows(self.plan_facts()))
            advice = display_facts.advice(run.config, job.module, self.splits.train)
            has_validation = bool(self.splits.validation_sets)
            follows_scores = self.plateau_hook is not None
            notes = selects_by_test(run.config, has_validation, follows_scores)
            cost = cost_of(job.module.model, "strategy.sync_bn=false")
            if cost and run.world.size > 1:
                notes.append(f"note: {cost}")
            for line in [*advice, *notes]:
                run.display.line(line)
        self.selection_hook.stop_if_due(job)
        if job.step >= job.plan.steps:
            stopped_early = self.selection_hook.stopped_early
            reason = f"{job.plan.steps:,} were asked for"
            if stopped_early:
                reason = stopped_early["reason"]
            run.display.line(
                f"nothing is left to train: {counted(job.step, 'step')} done, {reason}"
            )
        run.display.start(job.plan.steps, lambda: job.step)

    def plan_facts(self) -> PlanFacts:
        job = self.job
        counts = parameter_counts(job.module.model)
        streamed = numbered_stream_of(self.splits.train)
        optimizer = job.stepper.optimizer
        return PlanFacts(
            config=self.run.config,
            is_kept=self.run.worker.kept_memory is not None,
            plan=job.plan,
            task=job.module.task,
            parameters=counts["all"],
            trained_parameters=counts["trained"],
            base_lr=optimizer.defaults.get("lr", job.stepper.base_lrs[0]),
            warmup_steps=warmup_steps(self.run.config.schedule, job.plan),
            schedule_metric=self.plateau_hook.metric if self.plateau_hook else None,
            first_step=job.step,
            set_sizes={
                name: len(source)
                for name, source in (self.splits.validation_sets | self.splits.test_sets).items()
            },
            rates=self.metrics_hook.rates,
            optimizer=optimizer,
            own_statistics=own_statistics(job.module.model),
            origin=describe_origin(self.origin) if self.origin else None,
            problem_of_stream=streamed.problem_of_state if streamed else "",
            stand_ins_count=job.stand_ins_count,
        )

    def fit(self) -> Scores | None:
        """Train; a stop request ends it on all ranks after the same step.

        Returns the scores of the final weights; None if the run was stopped.
        """
        job = self.job
        self.metrics_hook.start_clocks(job.step)
        try:
            with self._surroundings():
                if self.run.config.tuning.rehearse:
                    rehearse(job)
                    self.metrics_hook.start_clocks(job.step)
                if self.owes_hooks:
                    for hook in job.hooks:
                        hook.act(job)
                fit(job)
                scores = None
                if job.step >= job.plan.steps:
                    scores = self._final_scores()
                return scores if self._is_mirrored() else None
        finally:
            self.run.display.stop()

    def _is_mirrored(self) -> bool:
        """Wait for the copy of the last checkpoint. False if a later start has to continue it."""
        run = self.run
        writer = self.checkpoint_hook.writer
        mirroring = writer.mirroring if writer else None
        return mirror_run.finish(mirroring, run.config, self.job.stop, run.status, run.device)

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Inside, stop requests are heard, user hooks are entered, and steps are kept."""
        run = self.run
        worker = run.worker
        connection = worker.store.clone() if worker.store else None
        patience = run.config.launch.grace_seconds / 2
        with (
            self.job.stop.listening(run.status, run.world, connection, patience, worker.leave),
            self.job.stepper.logged.open(),
            self.user_hooks.entered(),
        ):
            with self._recovery():
                yield
            # Not after an error, which is still that of the phase in which it was raised.
            run.status.phase = "hook"

    def _recovery(self) -> AbstractContextManager[None]:
        """A context in which the state after each step is kept, where others could take it up."""
        run = self.run
        world = run.world
        memory = run.worker.kept_memory
        if memory:
            return self._kept_by(self._run_keeper(memory))
        if run.config.host_range and world.size > 1:
            return self._recovery_on_hosts()
        return contextlib.nullcontext()

    def _run_keeper(
        self, memory: KeptMemory, gathered: Callable[[], Tensor] | None = None
    ) -> RunKeeper:
        world = self.run.world
        device = self.job.stepper.device
        keeper = StateKeeper(memory, world.local_rank, world.local_size, device)
        return RunKeeper(keeper, self._hooks_change_it, self.user_hooks.have_state, gathered)

    def _kept_by(self, keeper: RunKeeper) -> AbstractContextManager[None]:
        owner = run_lock.owner(self.run.run_dir / run_lock.FILE)
        return keeper.keeping(self.job, self.checkpoint_hook, self.owes_hooks, owner)

    @property
    def _hooks_change_it(self) -> bool:
        """Whether hooks may change the state of the job: those of the user may."""
        return bool(self.user_hooks.acting)

    @contextlib.contextmanager
    def _recovery_on_hosts(self) -> Iterator[None]:
        run = self.run
        job = self.job
        memory = None
        keeping: AbstractContextManager[None] = contextlib.nullcontext()
        reason = reason_not_kept(job, self._hooks_change_it)
        if not reason and run.worker.store:
            memory = memory_of_host(run.world, run.worker.store)
            if total(torch.tensor(float(memory is None))):
                memory = None  # what each rank alone has is sent by all ranks, or by none
                reason = "the size of files is limited on a host (ulimit -f)"
        if reason:
            log.info("if a host is lost, the run restarts from its last checkpoint: %s", reason)
        if memory:
            numbers = OwnNumbers(job)
            job.stepper.observers.insert(0, numbers)
            keeping = self._kept_by(self._run_keeper(memory, lambda: numbers.of_ranks))
        with saving_on_loss(job, memory, run.run_dir, run.world, run.status), keeping:
            yield

    def _final_scores(self) -> Scores | None:
        """The scores of the final weights by set; None if a stop request ended an evaluation."""
        job = self.job
        average = job.stepper.average
        scores = dict(job.scores)
        if not scores:
            # Nothing was left to train, or a stop request ended the last evaluation.
            scores = score_sets(job.evaluations, average)
            if scores is None:
                return None
            self._write_scores(scores)
            best = self.selection_hook.best
            best.see(job.step, scores[best.selection.split].metrics)
        if not self.splits.validation_sets:
            return scores
        test_scores = score_sets(self.test_evaluations, average)
        if test_scores is None:
            return None
        self._write_scores(test_scores)
        return scores | test_scores

    def _write_scores(self, scores: Scores) -> None:
        for name, score in scores.items():
            self.metrics_hook.write_score(self.job, name, score)

    def summary(self, scores: Scores | None) -> dict[str, Any]:
        """The content of summary.json. A collective: the best checkpoint may be scored for it.

        scores: those of the final weights; None if the run was stopped.
        """
        return summary_of_training(
            self.run,
            self.job,
            self.metrics_hook,
            self.selection_hook,
            scores,
            self.test_evaluations,
        )

    def close(self) -> None:
        """End what keeps batches coming, free what was captured. To be called after `summary`."""
        for evaluation in (*self.job.evaluations.values(), *self.test_evaluations.values()):
            evaluation.close()
        self.job.stepper.close()


def build_metrics_hook(
    run: RunContext, splits: Splits, start: StartingPoint, job: Job
) -> MetricsHook:
    """The hook that records losses, speeds and scores."""
    config = run.config
    first_step = start.step
    if start.owes_hooks:
        first_step -= 1  # they write the lines of that step again
    return MetricsHook(
        run.display,
        MetricsFile(run.run_dir, run.world.is_leader, first_step),
        hardware_monitor_for(run.device, all_gpus=config.strategy.spreads_over_gpus),
        Intervals(
            config.train.most_epochs,
            config.train.log_every_steps,
            config.train.evaluate_every_epochs,
            config.train.evaluate_every_steps,
        ),
        rates=display_facts.build_rates(config, run.world, run.device, job, splits.train),
    )


def build_plateau_hook(config: Config, job: Job) -> PlateauHook | None:
    """The hook of a schedule that follows the evaluations.

    Raises ConfigError if no checkpoint could be read with its state.
    """
    schedule = job.stepper.schedule
    if not isinstance(schedule, PlateauSchedule):
        return None
    problem = problem_of_state(schedule.state())
    if problem:
        found = f"schedule: the state_dict of {type(schedule.scheduler).__name__}"
        rule = f"is not plain data: {problem}; {PLAIN_DATA}"
        raise ConfigError([f"{found} {rule}"])
    split = split_of_metric(config.schedule)
    return PlateauHook(schedule, metric_of(config.schedule), split)


def build_user_hooks(run: RunContext, job: Job) -> UserHooks:
    """The hooks that the config names."""
    items = run.config.hooks
    paths = [hook.target for hook in hooks_named_by(items).values()]
    context = HookContext(job, run.run_dir, run.world)
    hooks = build_hooks(items, context, run.run_dir, run.world)
    return UserHooks(hooks, paths, context)


def start_trackers(
    run: RunContext, tracking: Tracking, metrics_file: MetricsFile, first_step: int
) -> None:
    """Send the trackers the lines that the file has, and from now on each new one."""
    config = run.config
    values = to_values(config)
    for name in ("reasons", "chosen_keys"):
        del values[name]
    tracked_run = TrackedRun(
        run.run_dir, config.name, config.tracker.project, plain_values(values), first_step
    )
    tracking.start(tracked_run, metrics_file.kept)
    metrics_file.listeners.append(tracking.write)


def hooks_of(training: Training, tracking: Tracking) -> list[Hook]:
    """All hooks, in the order in which they act between two steps.

    The job has the hooks that belong to its model: those that unfreeze it.
    """
    status = training.run.status
    lost = _lost_rank(training.run)
    user_hooks = [ReportedHook(hook, status, "hook") for hook in training.user_hooks.acting]
    unfreezing = [ReportedHook(hook, status, "unfreeze") for hook in training.job.hooks]
    hooks: list[Hook | None] = [
        # First: its line in metrics.jsonl is of an earlier step than those of the others.
        _resize_hook(training, lost),
        # Takes the losses and evaluates; the others ask it for the score.
        ReportedHook(training.metrics_hook, status, "record"),
        # Needs the score, and may end the plan: the others then act as at the end of a run.
        ReportedHook(training.selection_hook, status, "record"),
        # Closes an epoch that has ended, or that the selection has cut short.
        ReportedHook(EpochHook(training.metrics_hook), status, "record"),
        # Needs the score, and sets the rates of the steps that follow.
        training.plateau_hook and ReportedHook(training.plateau_hook, status, "record"),
        # Before their state is saved.
        *user_hooks,
        # Saves all of the above.
        ReportedHook(training.checkpoint_hook, status, "checkpoint"),
        _copies_hook(training),
        _attributes_hook(training),
        # On rank 0 alone, like samples and traces: nothing here is part of a checkpoint.
        *_tensorboard_hooks(training, tracking),
        # After the save: a run that resumes at this step unfreezes when it is built.
        *unfreezing,
        # The run is complete and saved by now.
        _sample_hook(training),
        # A traced step begins behind the hooks and ends before them.
        *_profile_hooks(training),
        _noise_hook(training),
        # Last: the first step after a loss counts with its hooks.
        _recovery_hook(training, lost),
    ]
    return [hook for hook in hooks if hook is not None]


def build_checkpoint_hook(training: Training) -> CheckpointHook:
    """The hook that saves. Raises ConfigError if no checkpoint could be read with its model."""
    run = training.run
    config = run.config
    section = config.checkpoint
    selection_hook = training.selection_hook
    problem = problem_of_extra_state(training.job.module.model)
    if problem:
        raise ConfigError([f"model: {problem}; {PLAIN_DATA}"])
    writer = None
    if run.world.is_leader:
        mirroring = None
        if section.mirror:
            mirroring = Mirroring(Mirror(section.mirror), run.run_dir)
        writer = Writer(
            run.run_dir,
            section.keep,
            selection_hook.best.selection if section.best else None,
            run.status.set_saving,
            mirroring,
        )
    further_hooks: dict[str, StatefulHook] = {
        SELECTION: selection_hook,
        USER_HOOKS: training.user_hooks,
    }
    if training.plateau_hook:
        further_hooks[SCHEDULE] = training.plateau_hook
    if training.job.stream_position:
        further_hooks[STREAM] = training.job.stream_position
    every_steps = section.every_steps
    if every_steps is None and config.train.most_epochs is None:
        every_steps = config.train.evaluate_every_steps
    return CheckpointHook(
        writer,
        training.metrics_hook,
        manifest_facts(training),
        SaveTimes(every_steps, section.every_minutes, section.best),
        further_hooks,
    )


def manifest_facts(training: Training) -> dict[str, Any]:
    """The facts of config, data and model that the manifest of every checkpoint has."""
    run = training.run
    config = run.config
    manifest_then = training.start.manifest
    origin = manifest_then.get("begun_with")
    if training.origin:
        origin = dataclasses.asdict(training.origin)
    module = training.job.module
    digests_then = manifest_then.get("scored_digests", {})
    return {
        "config": to_values(config),
        "world_size": run.world.size,
        "hosts": from_leader(_hosts(run), run.device),
        "torch": torch.__version__,
        "data_digests": training.data_digests,
        "trained": list(trained_parameters(config, module)),
        **facts_of_model(config, training.splits.train, module.task),
        "scored_digests": scored_digests(training.splits, digests_then),
        "begun_with": origin,
        "best_by": dataclasses.asdict(training.selection_hook.best.selection),
    }


def _lost_rank(run: RunContext) -> dict[str, Any] | None:
    """The rank after whose loss this process was started; None if none was lost."""
    if run.config.host_range:
        return from_leader(lost_hosts.noted_loss(run.run_dir), run.device)
    return lost_rank()


def _recovery_hook(training: Training, lost: dict[str, Any] | None) -> RecoveryHook | None:
    if not lost:
        return None
    forget = partial(lost_hosts.forget_loss, training.run.run_dir)
    return RecoveryHook(training.metrics_hook, lost, training.start.step, forget)


def _resize_hook(training: Training, lost: dict[str, Any] | None) -> ResizeHook | None:
    run = training.run
    changes = changes_of_number()
    if run.config.host_range and training.start.checkpoint:
        size_then = training.start.manifest.get("world_size", run.world.size)
        names = names_of_change(training.start.manifest.get("hosts", []), _hosts(run))
        changes = changes_of_hosts(
            training.metrics_hook, lost, size_then, run.world.size, run.device, names
        )
        if changes and not lost:  # a loss is told by who reported it
            run.display.line(_change_line(changes[-1], training.start.step))
    if not changes:
        return None
    return ResizeHook(training.metrics_hook, changes, training.start.step, run.device)


def _hosts(run: RunContext) -> list[str]:
    """The names of the hosts where hosts may leave and join, on rank 0; else empty."""
    store = run.worker.store
    if not run.config.host_range or not store or not run.world.is_leader:
        return []
    return sorted({*peer_check.hosts_of_ranks(store, run.world)})


def _change_line(change: dict[str, Any], step: int) -> str:
    """`host node2 left after step 18; 1 process continues`.

    change: see `launcher.size.Change`.
    """
    continues = "continues" if change["to"] == 1 else "continue"
    return f"{change['why']} after step {step:,}; {counted(change['to'], 'process')} {continues}"


def _tensorboard_hooks(training: Training, tracking: Tracking) -> list[Hook]:
    config = training.run.config
    if not config.tracker.details:
        return []
    plan = training.job.plan
    batch = partial(first_batch, config, plan, training.splits.train, training.run.device)
    return tensorboard_details(tracking.threads, training.job.module.model, batch)


def _noise_hook(training: Training) -> NoiseHook | None:
    """Says what steps draw by rank, on rank 0 of several processes."""
    run = training.run
    if not run.world.is_leader or run.world.size == 1:
        return None
    seed = StepSeed(run.config.seed, run.world.rank, run.device)
    draws_by_shard = run.config.strategy.fixes_bits  # the same on any number of processes

    def drew_by_rank(step: int) -> bool:
        return not draws_by_shard and seed.has_moved(step, CURRENT.marks)

    return NoiseHook(run.display, drew_by_rank)


def _copies_hook(training: Training) -> CopiesHook | None:
    """Names what moves along in no checkpoint, on rank 0, where code of the user's may hold it."""
    run = training.run
    holders: dict[str, Any] = {}
    if isinstance(run.config.task, CustomOption):
        holders["task"] = training.job.module.task
    for hook in training.user_hooks.hooks:
        if not hasattr(hook.hook, "state_dict"):
            holders[hook.path] = hook.hook
    if not run.world.is_leader or not holders:
        return None
    next_checkpoint = training.checkpoint_hook.times.next_step
    return CopiesHook(run.display, training.job.module.model, holders, next_checkpoint)


def _attributes_hook(training: Training) -> AttributesHook | None:
    """Names attributes that are in no checkpoint, on rank 0, where code of the user's may change
    them."""
    run = training.run
    config = run.config
    sections = (config.model, config.task)
    has_code = any(isinstance(section, CustomOption) for section in sections)
    hooks = [hook.hook for hook in training.user_hooks.hooks]
    if not run.world.is_leader or not (has_code or hooks):
        return None
    return AttributesHook(run.display, hooks, training.checkpoint_hook.times.next_step)


def _sample_hook(training: Training) -> Hook | None:
    run = training.run
    write_sample = display_facts.text_writer(run.config, training.splits.train)
    if not write_sample or not run.world.is_leader:
        return None
    hook = SampleHook(write_sample, run.display, run.run_dir / SAMPLE)
    return ReportedHook(hook, run.status, "sample")


def _profile_hooks(training: Training) -> list[Hook]:
    run = training.run
    path = run.run_dir / "profile" / f"rank_{run.world.rank}"
    steps = run.config.train.profile_steps
    hooks = profile_hooks(steps, training.job, path, run.device, run.display)
    return [ReportedHook(hook, run.status, "profile") for hook in hooks]
