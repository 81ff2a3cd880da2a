"""A job as a run of one process builds it, for the checks of a proof."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ddp_lab.prove.division import Division
from ddp_train.assembly.batches import loader_options
from ddp_train.assembly.data_sets import open_datasets
from ddp_train.assembly.initial_weights import load_named_weights
from ddp_train.assembly.job import JobBuilder
from ddp_train.assembly.model import build_module, try_user_code
from ddp_train.assembly.strategy import build_strategy
from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import BatchPlan, MicroBatch
from ddp_train.data.datasets import BatchSource
from ddp_train.data.loader import Loader
from ddp_train.data.user_dataset import parts_of
from ddp_train.distributed.training_step import scored
from ddp_train.distributed.world import World
from ddp_train.models.python_state import state_of
from ddp_train.options.schema import Config
from ddp_train.parallel.strategy import Single
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.tasks.task import ModelWithTask


class Bench:
    """The objects of a job. Raises what the job raises."""

    def __init__(self, config: Config, samples_per_micro_batch: int) -> None:
        """config: as `configs.for_proof` makes it.

        samples_per_micro_batch: of the job itself, for messages; 0 if it is not known.
        """
        self.config = config
        self.samples_per_micro_batch = samples_per_micro_batch
        self.precision = config.tuning.precision
        self.status = RankStatus()
        self.splits = open_datasets(config)
        self.initial_data_state = state_of(parts_of(self.splits.train))
        self.strategy = Single("cpu")
        self.allows_missing_gradients = build_strategy(config, World(), "cpu").allow_missing_grads
        self.synchronises_batch_norm = bool(getattr(config.strategy, "sync_bn", False))
        self.module: ModelWithTask = build_module(config, self.splits.train, self.strategy, "cpu")
        load_named_weights(config, self.module.model, World(), "cpu")
        try_user_code(config, self.module, self.splits, "cpu")
        builder = self._builder(World())
        job = builder.build_job(self.splits)
        self.plan: BatchPlan = dataclasses.replace(job.plan, virtual_shards=None)
        mix = builder.build_mix(self.splits.train)
        options = dataclasses.replace(loader_options(config, self.module.task), num_workers=0)

        def load(micro_batches: Sequence[MicroBatch]) -> Iterable[Batch]:
            return Loader(self.splits.train, micro_batches, "cpu", options, mix)

        self.division = Division(self.module, self.plan, load)

    def _builder(self, world: World, config: Config | None = None) -> JobBuilder:
        return JobBuilder(
            config or self.config, world, "cpu", self.module, self.strategy, self.status
        )

    @property
    def parts(self) -> dict[str, Any]:
        """The user's objects that take part in a forward pass."""
        parts: dict[str, Any] = {"model": self.module.model}
        if getattr(self.config.task, "target", None):
            parts["task"] = self.module.task
        return parts

    @torch.no_grad()
    def scores(self, source: BatchSource, batch_size: int, processes: int) -> dict[str, float]:
        """The metrics of a set, with the batches of one process after those of another."""
        train = dataclasses.replace(self.config.train, evaluate_batch_size=batch_size)
        config = dataclasses.replace(self.config, train=train)
        self.module.eval()
        try:
            scorer = None
            for rank in range(processes):
                world = World(rank, processes, rank, processes)
                evaluation = self._builder(world, config).build_evaluation(source)
                scorer = scorer or evaluation.new_scorer()
                for batch in evaluation.batches:
                    micro_batch = batch.micro_batch
                    with scored(micro_batch):
                        score = self.module.score(batch.data)
                    scorer.add(micro_batch.step, score, micro_batch.num_real)
                evaluation.close()
            total = scorer.result() if scorer else None
            assert total, "no stop was asked for"
            return total.metrics
        finally:
            self.module.train()
