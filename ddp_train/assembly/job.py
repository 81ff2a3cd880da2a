"""The collaborators of the loop, built for one model on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch
from torch import nn

from ddp_train.assembly.batches import first_batch, is_resident, loader_options
from ddp_train.assembly.metrics import directions
from ddp_train.assembly.model import all_take_empty_batch, may_count_samples, task_of_set
from ddp_train.assembly.optimizer import optimizer_of, trained_parameters
from ddp_train.assembly.plan import build_plan
from ddp_train.assembly.sampler import sampled_epochs
from ddp_train.assembly.schedule import schedule_of
from ddp_train.config.switches import CAPTURED_IF_IT_PAYS
from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import BatchPlan, evaluation_batches
from ddp_train.data.datasets import BatchSource, is_read_in_order
from ddp_train.data.loader import Loader
from ddp_train.data.mix import Mix, mix_of
from ddp_train.data.rng import StepSeed
from ddp_train.data.sample_facts import lengths_of
from ddp_train.data.splits import Splits
from ddp_train.data.user_dataset import UserDataset, numbered_stream_of
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Evaluation, Forward, Hook, Job
from ddp_train.engine.non_finite_data import cause_of_non_finite_score
from ddp_train.engine.step_observers import PhaseReports, ReportedBatches
from ddp_train.engine.stream_position import StreamPosition
from ddp_train.engine.unfreeze_hook import UnfreezeHook
from ddp_train.models.put_back import reading_ahead
from ddp_train.optim.ema import WeightAverage
from ddp_train.optim.stepper import Stepper, UpdateRules
from ddp_train.options.schema import Config
from ddp_train.parallel.strategy import Strategy
from ddp_train.performance.cuda_graph import GraphedStepper, on_stream
from ddp_train.performance.flops import flops_of_samples
from ddp_train.performance.worth_capturing import CaptureTrial
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.tasks.builtin import Classification
from ddp_train.tasks.score import Scorer
from ddp_train.tasks.task import ModelWithTask

MOST_SKIPPED = 1000
"""Most steps in a row that `train.on_non_finite=skip` leaves out, where an epoch has more."""


@dataclass(frozen=True)
class JobBuilder:
    """Builds what the loop needs. All processes call it alike: some of it is exchanged."""

    config: Config
    world: World
    device: str
    module: ModelWithTask
    strategy: Strategy
    status: RankStatus
    """The board to report batches and steps on."""

    def build_job(self, splits: Splits, first_step: int = 0) -> Job:
        """The job that `fit` takes up after `first_step` steps, with the weights of rank 0."""
        config = self.config
        module = self.module
        plan = self.build_plan(splits)
        mix = self.build_mix(splits.train)
        stream = None
        if config.tuning.cuda_graph and config.device == "cuda":
            stream = torch.cuda.Stream(self.device)
        unfreezing_step = (config.model.freeze_epochs or 0) * plan.steps_per_epoch
        frozen = module.frozen if unfreezing_step else None
        if frozen and first_step >= unfreezing_step:
            frozen.unfreeze()
            module.train()
        trained = trained_parameters(config, module)
        wrap = partial(self.wrap, splits.train, plan, mix, stream)
        wrapped = wrap()
        stepper = self.build_stepper(wrapped, plan, trained, stream)
        forward: Forward = wrapped
        if isinstance(stepper, GraphedStepper):
            forward = stepper.forward
        hooks: list[Hook] = []
        if frozen:
            hooks.append(UnfreezeHook(unfreezing_step, frozen, wrap))
        loader = self.build_loader(splits.train, plan, first_step, mix)
        batches: Iterable[Batch] = ReportedBatches(loader, self.status)
        stream_position = None
        streamed = numbered_stream_of(splits.train)
        if streamed and not streamed.problem_of_state:
            batches = stream_position = StreamPosition(batches, streamed)
        return Job(
            plan=plan,
            module=module,
            wrapped=forward,
            strategy=self.strategy,
            stepper=stepper,
            batches=batches,
            evaluations=self.build_evaluations(splits.scored_sets),
            seed_step=StepSeed(config.seed, self.world.rank, self.device),
            hooks=hooks,
            step=first_step,
            stream_position=stream_position,
            stand_ins_count=self.stand_ins_may_count(plan) and not loader.has_empty_batches,
        )

    def build_plan(self, splits: Splits) -> BatchPlan:
        """The plan of which process computes which samples in which step."""
        config = self.config
        source = splits.train
        units = 1.0
        if not self.module.task.units_are_samples:
            with reading_ahead(source):
                sample = source.get_batch(np.array([0]), None)
            units = self.module.task.units_per_sample(sample)
        lengths = None
        if config.data.batch_by == "tokens":
            lengths = lengths_of(source, config.train.global_batch_size)
        sampled = sampled_epochs(config, source)
        plan = build_plan(
            config,
            self.world,
            len(source),
            splits.weights,
            lengths,
            sampled,
            units_per_sample=units,
            in_order=is_read_in_order(source),
        )
        epochs = -(-plan.steps // plan.steps_per_epoch)
        if isinstance(source, UserDataset):
            source.check_lengths(epochs)
        if sampled:
            sampled.check_epochs(epochs)
        return plan

    def build_mix(self, source: BatchSource) -> Mix | None:
        """Mixup and CutMix; None if the config asks for neither."""
        data = self.config.data
        classifies = isinstance(self.module.task, Classification)
        return mix_of(source, self.config.seed, data.mixup, data.cutmix, classifies)

    def wrap(
        self,
        source: BatchSource,
        plan: BatchPlan,
        mix: Mix | None,
        stream: torch.cuda.Stream | None,
    ) -> nn.Module:
        """The model as the training step calls it; again when other parameters require gradients.

        stream: the one on which steps are captured; None if they are not.
        """
        samples_per_step = plan.global_batch_size / self.world.size
        if plan.lengths is not None:  # batches of so many tokens: samples differ in cost
            samples_per_step = 0
        with on_stream(stream):
            wrapped = self.strategy.wrap(
                self.module, partial(flops_of_samples, self.module, source, samples_per_step)
            )
            self.strategy.warm_up(partial(first_batch, self.config, plan, source, self.device, mix))
        return wrapped

    def build_stepper(
        self,
        wrapped: nn.Module,
        plan: BatchPlan,
        trained: dict[str, nn.Parameter],
        stream: torch.cuda.Stream | None,
    ) -> Stepper:
        """The optimizer with all that a step does beside it. trained: see `trained_parameters`."""
        config = self.config
        train = config.train
        strategy = self.strategy
        optimizer = optimizer_of(config, self.module, trained, captured=stream is not None)
        better = directions(self.module)
        schedule = schedule_of(config.schedule, plan, optimizer, better, stream is not None)
        is_fp16 = config.tuning.precision == "fp16"
        scaler = torch.amp.GradScaler(torch.device(self.device).type, enabled=is_fp16)
        average = None
        if train.ema_decay:
            average = WeightAverage(
                self.module,
                train.ema_decay,
                train.ema_warmup,
                scaler.is_enabled(),
                trained.values(),
            )
        most_skipped = None
        if train.on_non_finite == "skip":
            most_skipped = min(plan.steps_per_epoch, MOST_SKIPPED)
        rules = UpdateRules(
            mean_of_units=strategy.mean_of_units,
            check_gradients=strategy.check_gradients,
            max_grad_norm=train.max_grad_norm,
            allow_missing_grads=strategy.allow_missing_grads,
            most_skipped=most_skipped,
        )
        make_stepper: Callable[..., Stepper] = Stepper
        if stream:
            make_stepper = partial(
                GraphedStepper, wrapped, stream, plan.is_full, trial=self.build_capture_trial()
            )
        observers = [PhaseReports(self.status)]
        return make_stepper(optimizer, schedule, scaler, rules, average, observers)

    def build_capture_trial(self) -> CaptureTrial:
        """Decides after some steps whether they are captured."""
        reason = self.config.reasons.get("cuda_graph")  # none if the user asked for it
        roots = {"model": self.module.model, "task": self.module.task}
        return CaptureTrial(
            self.device, roots, asked=not reason, if_it_pays=reason == CAPTURED_IF_IT_PAYS
        )

    def build_loader(
        self, source: BatchSource, plan: BatchPlan, first_step: int, mix: Mix | None
    ) -> Loader:
        """The batches of training. One iterator lives through all epochs."""
        options = replace(
            loader_options(self.config, self.module.task, source),
            persistent_workers=False,
            resident=is_resident(self.config.data),
        )
        has_empty_batches = self.stand_ins_may_count(plan) and all_take_empty_batch(
            self.config, self.module, source, self.device
        )
        micro_batches = plan.from_step(first_step)
        return Loader(source, micro_batches, self.device, options, mix, has_empty_batches)

    def stand_ins_may_count(self, plan: BatchPlan) -> bool:
        """True if some process has no sample in some micro-batch, and it matters what it has."""
        return plan.has_empty_parts and may_count_samples(self.config, self.module)

    def build_evaluations(self, sets: Mapping[str, BatchSource]) -> dict[str, Evaluation]:
        """The evaluation of each set, by its name."""
        return {name: self.build_evaluation(source) for name, source in sets.items()}

    def build_evaluation(self, source: BatchSource) -> Evaluation:
        """The evaluation of a data set, with its loader and scorer."""
        batch_size = self.config.train.evaluate_batch_size
        micro_batches = evaluation_batches(
            len(source), batch_size, self.world.rank, self.world.size
        )
        task = self.module.task
        options = replace(
            loader_options(self.config, task, source), resident=is_resident(self.config.data)
        )
        loader = Loader(source, micro_batches, self.device, options)
        batch_count = -(-len(source) // batch_size)
        batches = ReportedBatches(loader, self.status, "evaluation ")
        return Evaluation(
            module=self.module,
            strategy=self.strategy,
            batches=batches,
            # Once: the data stay what they are.
            explain=cache(partial(cause_of_non_finite_score, batches, self.device)),
            new_scorer=partial(
                Scorer,
                batch_count,
                self.device,
                task_of_set(task, source).derive,
                self.module.further_metrics,
            ),
            close=loader.close,
        )
