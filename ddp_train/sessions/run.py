"""The object that the user's loop calls: `with ddp_train.session(...) as run`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ddp_train.data.sample_stream import is_stream
from ddp_train.models.living_objects import living_objects
from ddp_train.models.unsaved_copies import UnsavedCopies
from ddp_train.parallel.sync_batch_norm import cost_of
from ddp_train.sessions.batch_norm import update_statistics
from ddp_train.sessions.data_arguments import (
    TEST_BATCH_SIZE,
    DataArguments,
    checked_batch_size,
    scored_samples,
    whole_arguments,
)
from ddp_train.sessions.exchange_watch import GATHER, LOADER, SUM, TEST_LOADER, UPDATE_BN
from ddp_train.sessions.learning_rates import warn_of_fractions
from ddp_train.sessions.loader import (
    Collate,
    TestLoader,
    common_digests,
    numbered_feed,
    options_of,
    source_of,
)
from ddp_train.sessions.session_checkpoints import SessionCheckpoints, check_objects
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.steps import Steps
from ddp_train.sessions.stream_feed import stream_feed
from ddp_train.sessions.training_loader import TrainingLoader
from ddp_train.sessions.unsaved import refuse_unsaved_schedulers
from ddp_train.sessions.values import gather_over_ranks, sum_over_ranks
from ddp_train.sessions.wrapped import Wrapped
from ddp_train.telemetry.trackers.media import Media
from ddp_train.telemetry.trackers.media_calls import MediaCalls


class Run(MediaCalls):
    """One process of a run. Every process calls the same methods in the same order."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    @property
    def rank(self) -> int:
        """The number of this process among all."""
        return self._steps.world.rank

    @property
    def processes(self) -> int:
        """The number of processes, over all hosts."""
        return self._steps.world.size

    @property
    def device(self) -> torch.device:
        """The device of this process, where batches come and the model of `wrap` is."""
        return torch.device(self._steps.device)

    @property
    def step(self) -> int:
        """The number of batches that are done, in all epochs.

        A batch is done when the next one is asked for, or its epoch ends.
        """
        return self._steps.position.step

    def wrap(self, model: nn.Module, *, sync_batch_norm: bool = True, **options: Any) -> Wrapped:
        """The model on this process's device, whose gradients are the mean over all processes.

        Call it before the optimizer is built, for each model that trains. A teacher, which does
        not train, may be wrapped too: it is then on the device, its batch norm over all.

        sync_batch_norm: batch norm over the samples of all processes, as one process would have
            them; False: each has its own, which is faster and depends on their number.
        options: of torch's DistributedDataParallel, by torch's names (find_unused_parameters,
            bucket_cap_mb, gradient_as_bucket_view ...).

        Raises UsageError if it got a part of the model before.
        """
        steps = self._open_steps("run.wrap")
        wrapped = steps.models.add(model, sync_batch_norm, options)
        note = cost_of(wrapped.module, "run.wrap(model, sync_batch_norm=False)")
        if note and steps.world.is_leader:
            print(f"note: run.wrap: {note}", file=sys.stderr)
        wrapped.register_forward_pre_hook(steps.see_forward)
        if self.processes > 1:
            wrapped.register_forward_hook(steps.see_pass, with_kwargs=True)
        return wrapped

    def loader(
        self,
        dataset: Any,
        *,
        global_batch_size: int | None = None,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        drop_last: bool = False,
        repeat: bool = False,
        split_by_node: bool = False,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
    ) -> TrainingLoader:
        """The batches to train on, in place of DataLoader and DistributedSampler.

        Each epoch has each sample once, in an order of its own, or what a sampler gives. The global
        batches are the same for any number of processes, which share each as evenly as possible;
        nothing is padded. Iterate it inside of `epochs`; several may give their batches to one step
        (`zip(labelled, unlabelled)`). What samples draw at random (torch's, numpy's and Python's
        global generators) depends on seed, epoch and sample alone. Tensors come on `run.device`.

        dataset: map-style, or a stream of samples (IterableDataset); or a DataLoader, whose
            batch_size, sampler, collate_fn and so on are taken over, its batch size as the global
            one.
        global_batch_size: samples of a step over all processes.
        shuffle: False: the order of the data set.
        sampler: gives the numbers of the samples of an epoch, over all processes.
        batch_sampler: gives the global batches of an epoch, lists of numbers of samples.
        drop_last: leave out the last batch of an epoch if it is short.
        repeat: begin anew after the last batch, without an end.
        split_by_node: the stream gives each process other samples; else all read the same, and each
            keeps its rows.
        num_workers: processes that prepare batches, for each rank; 0: none.
        collate_fn: as torch's.

        Raises UsageError for other data, and PeerError if they are not the same for all processes.
        """
        steps = self._open_steps(LOADER)
        arguments = DataArguments(
            dataset,
            batch_size=global_batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last,
            num_workers=num_workers,
            collate_fn=collate_fn,
        )
        arguments = whole_arguments(arguments, LOADER)
        steps.exchange_watch.enter(LOADER)
        if is_stream(arguments.dataset):
            feed = stream_feed(steps, arguments, split_by_node)
            return TrainingLoader(steps, feed, arguments.dataset, repeat)
        if split_by_node:
            raise UsageError(
                "run.loader: split_by_node=True is for streams, and"
                f" {type(arguments.dataset).__name__} has numbered samples",
                "leave it out: global batches are shared out exactly",
            )
        feed = numbered_feed(steps, arguments)
        return TrainingLoader(steps, feed, arguments.dataset, repeat)

    def test_loader(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
    ) -> TestLoader:
        """The batches of a data set that is scored: each sample once, on one process, in order.

        Add up over processes with `sum`, or take rows together with `gather`.

        dataset: map-style; or a DataLoader, which says the rest.
        batch_size: samples of a batch on one process.
        """
        method = TEST_LOADER
        steps = self._open_steps(method)
        seed = steps.settings.seed
        arguments = DataArguments(
            dataset, batch_size=batch_size, num_workers=num_workers, collate_fn=collate_fn
        )
        samples = dataset
        if isinstance(dataset, DataLoader):
            arguments = whole_arguments(arguments, method)
            samples = scored_samples(arguments, seed)
        size = checked_batch_size(arguments.batch_size, "batch_size", TEST_BATCH_SIZE, method)
        source = source_of(samples, seed, arguments.collate_fn, method)
        steps.exchange_watch.enter(TEST_LOADER)
        common_digests(source, steps.device, method)
        options = dataclasses.replace(
            options_of(steps.device, arguments.num_workers),
            worker_init_fn=arguments.worker_init_fn,
            prefetch_factor=arguments.prefetch_factor,
        )
        return TestLoader(steps, source, arguments.dataset, size, options)

    def resume(self, **objects: Any) -> int:
        """Name what a checkpoint consists of, and load the newest one of the run directory.

        If there is one the run resumes at the very next sample. Returns the number of steps that
        are done.

        objects: the models of `wrap`, and whatever has state_dict and load_state_dict: optimizers,
            schedulers, a GradScaler, objects of your own.

        Raises UsageError for what cannot be saved, and DataError if the checkpoint is of something
        else.
        """
        steps = self._open_steps("run.resume")
        if steps.checkpoints is not None:
            raise UsageError(
                "run.resume was called twice",
                "call it once, with all objects; folds that are trained one after the other are"
                " commands, each with its run_dir, or sessions with processes=1",
            )
        named, others = check_objects(objects, steps.models)
        living = living_objects()
        refuse_unsaved_schedulers(others, living)
        steps.copies = UnsavedCopies(steps.models, others.values())
        steps.copies.look_for(living)
        steps.checkpoints = SessionCheckpoints(
            steps.settings, steps.world, named, others, steps.status
        )
        steps.checkpoints.may_differ_in_batch_norm = steps.models.has_own_batch_norm
        steps.watch_optimizers(others.values())
        steps.gradients.windows.see_objects(others.values())
        steps.position = steps.checkpoints.restore(steps.device, steps.gradients)
        if steps.position.batch:
            warn_of_fractions(others)
        if steps.kept_memory:
            steps.keep_in(steps.kept_memory)
        steps.numbers.resume(steps.position.step, steps.checkpoints.numbers)
        steps.status.step = steps.position.step
        return steps.position.step

    def epochs(self, count: int, *, save_every: int = 1, whole: bool = False) -> Iterator[int]:
        """The numbers of the epochs that are left, from 0 to `count`.

        A checkpoint is saved after every `save_every` epochs and after the last one. A stop
        (SIGTERM, Ctrl-C) ends the process between two steps, or two epochs.

        The global generators of torch, numpy and Python are seeded where an epoch begins and where
        its loop over batches ends, alike on all processes.

        whole: nothing is saved inside of an epoch, and a run resumes at the beginning of one: for
            loops that hold something from step to step, or from the epoch's beginning on, which is
            in no checkpoint. The epoch of a stop, a failure or a `break` is computed again.
        """
        steps = self._open_steps("run.epochs")
        if count < 0 or save_every < 1:
            raise UsageError(
                f"run.epochs: count={count}, save_every={save_every}", "use whole numbers above 0"
            )
        return steps.epochs(count, save_every, whole)

    def save(self) -> None:
        """Save a checkpoint as soon as this step is done, on all processes alike.

        It is saved before the next batch or, after the last one, at the end of the epoch.
        """
        steps = self._open_steps("run.save")
        steps.open_epoch("run.save")
        steps.is_save_due = True

    def mean(
        self,
        losses: Tensor,
        over: float | Tensor | None = None,
        *,
        of: TrainingLoader | None = None,
        accumulate: Optimizer | None = None,
    ) -> Tensor:
        """The mean loss over the global batch, for `backward()`.

        A scalar whose gradients are exact however unevenly the batch is shared. A step of the
        optimizer without it is an error. The value is this process's part: its mean over the
        processes is the mean loss.

        losses: one for each sample of this process, [n], as losses with reduction='none' are. With
            `over` any shape.
        over: number of units here that count (tokens, pixels, weights): the sum of the losses is
            divided by the sum of `over` over all processes, which takes an exchange.
        of: where several loaders gave a batch in this step, the one whose samples they are of.
        accumulate: an optimizer that steps every few batches. After each batch the gradients are
            those of the mean over all samples, or all units of `over`, since its last step.
        """
        return self._open_steps("run.mean").mean(losses, over, of, accumulate)

    def update_bn(self, loader: TrainingLoader, model: nn.Module) -> None:
        """Take the statistics of batch norm anew: of an average of weights, for instance.

        In place of `torch.optim.swa_utils.update_bn`: on any number of processes the statistics are
        those of the global batches of an epoch in one process. No step is counted. Every process
        must call it, after the loop over the loader.

        loader: of run.loader.
        model: on run.device, wrapped or not; called with a batch, or with its first element.

        Raises UsageError inside of the loop over the loader, and for other batches.
        """
        steps = self._open_steps(UPDATE_BN)
        steps.exchange_watch.enter(UPDATE_BN)
        update_statistics(steps, loader, model)

    def log(
        self,
        name: str,
        values: Tensor | float,
        over: Tensor | float | None = None,
        *,
        how: str = "mean",
    ) -> None:
        """Log a number of your own: a loss, a score, a learning rate.

        It stands in metrics.jsonl, a line every `log_every_steps` steps and at the end of each
        epoch, over all samples of all processes since the last one; on the page of the run, and in
        `ddp-train compare` and `watch`. Nothing is exchanged here, and nothing waits for the
        device; processes need not log the same.

        name: a slash groups names, vae/kl. Those of `test/` and `validation/` are scores, in a line
            of that kind for this step: test/accuracy.
        values: with how="mean" a number for each sample of this process, [n], as `run.mean` gets;
            with `over` a sum of this process. Between two steps also a number by itself, the same
            on all processes, as `run.sum` returns it.
        over: what a sum is taken over here: a number of samples or tokens, a mask.
        how: mean, sum, or last: one number, the same on all processes, as a learning rate is.

        Raises UsageError for a name that lines have already, and for a number by itself in a step:
        the number of samples that it is a mean of is not known.
        """
        self._open_steps("run.log").log(name, values, over, how)

    def _media_of(self, method: str) -> tuple[Media, int]:
        steps = self._open_steps(f"run.{method}")
        return steps.media, steps.log_step

    @overload
    def sum(self, value: Tensor) -> Tensor: ...
    @overload
    def sum(self, value: float) -> float: ...
    def sum(self, value: Tensor | float) -> Tensor | float:
        """The sum over all processes, for scores. Every process must call it.

        value: a number, or a tensor of the same shape on each. Integers are added up exactly,
            fractions in float64. A process without a batch may give 0.

        Returns a number, or a tensor if one of the processes has one. Raises UsageError on all of
        them if the values do not fit together, or if the processes are in different places.
        """
        steps = self._open_steps("run.sum")
        steps.score_watch.see_sum(self.processes)
        steps.see_sum(SUM, value)
        return sum_over_ranks(value, steps.device)

    def gather(self, rows: Tensor | Sequence[Tensor]) -> Tensor:
        """The rows of all processes, [n, ...] -> [all, ...], without gradients; n may differ.

        Those of all batches of a test loader together are in the order of the data set. Every
        process must call it.

        rows: a tensor, or a list of tensors that are put together; empty on a process without a
            batch. An empty tensor fits any.

        Raises UsageError as `sum` does.
        """
        steps = self._open_steps("run.gather")
        steps.see_sum(GATHER, rows)
        return gather_over_ranks(rows, steps.device)

    def _open_steps(self, method: str) -> Steps:
        """The steps of the session. Raises UsageError if it is over. method: for the message."""
        if self._steps.is_over:
            raise UsageError(
                f"{method} was called after the session", "call it inside of the `with`"
            )
        return self._steps
