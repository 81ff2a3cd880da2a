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
from ddp_train.sessions.saving import Saving
from ddp_train.sessions.session_checkpoints import SessionCheckpoints
from ddp_train.sessions.session_objects import check_objects
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.steps import Steps
from ddp_train.sessions.stream_feed import stream_feed
from ddp_train.sessions.training_loader import TrainingLoader
from ddp_train.sessions.values import gather_over_ranks, sum_over_ranks
from ddp_train.sessions.watches.unsaved import refuse_unsaved_schedulers
from ddp_train.sessions.wrapped import Wrapped
from ddp_train.telemetry.trackers.media import Media
from ddp_train.telemetry.trackers.media_calls import MediaCalls


class Run(MediaCalls):
    """One process of a session. Every process must call the same methods in the same order."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    @property
    def rank(self) -> int:
        """The rank of this process among all, from 0."""
        return self._steps.world.rank

    @property
    def processes(self) -> int:
        """The number of processes, over all hosts."""
        return self._steps.world.size

    @property
    def device(self) -> torch.device:
        """The torch.device of this process. Batches and wrapped models are on it."""
        return torch.device(self._steps.device)

    @property
    def step(self) -> int:
        """The number of batches done, over all epochs.

        A batch is done when the loop asks for the next one, or when its epoch ends.
        """
        return self._steps.loop.position.step

    def wrap(self, model: nn.Module, *, sync_batch_norm: bool = True, **options: Any) -> Wrapped:
        """Move a model to the device and wrap it as DistributedDataParallel does.

        Its gradients become means over all processes. Call it for each model that trains, before
        its optimizer is built. It may also wrap a model that does not train, such as a teacher.

        model: moved to `run.device`.
        sync_batch_norm: True computes batch norm over the samples of all processes, as one process
            would. False computes it over each process's own samples: faster, but the result depends
            on the number of processes.
        options: options of torch's DistributedDataParallel, by the same names
            (find_unused_parameters, bucket_cap_mb, gradient_as_bucket_view ...).

        Returns the wrapped model, whose state_dict has the names of the model itself. Raises
        UsageError for unknown options, and if a parameter belongs to a model that was wrapped
        before.
        """
        steps = self._open_steps("run.wrap")
        wrapped = steps.models.add(model, sync_batch_norm, options)
        note = cost_of(wrapped.module, "run.wrap(model, sync_batch_norm=False)")
        if note and steps.world.is_leader:
            print(f"note: run.wrap: {note}", file=sys.stderr)
        if self.processes > 1:
            wrapped.register_forward_pre_hook(steps.watches.see_forward)
            wrapped.register_forward_hook(steps.watches.see_pass, with_kwargs=True)
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
        """Return a loader of the batches to train on, in place of DataLoader and
        DistributedSampler.

        Iterate over it inside of `epochs`. An epoch has each sample once, shuffled anew, or the
        samples that a sampler gives. Global batches are the same for any number of processes, which
        divide each as evenly as possible, without padding. Tensors are on `run.device`. Random
        numbers in a data set (torch's, numpy's and Python's global generators) depend only on seed,
        epoch and sample. One step may use batches of several loaders: `zip(labelled, unlabelled)`.

        dataset: a map-style data set or an IterableDataset. Or a DataLoader, whose sampler,
            collate_fn and other arguments are used, with its batch_size as the global one.
        global_batch_size: number of samples per step, over all processes.
        shuffle: False keeps the order of the data set.
        sampler: yields the indices of the samples of an epoch, for all processes together.
        batch_sampler: yields the global batches of an epoch, lists of indices.
        drop_last: leave out the last batch of an epoch if it is smaller.
        repeat: start again after the last batch, without an end.
        split_by_node: True for an IterableDataset that yields different samples on each process.
            Otherwise all processes read the same samples, and each keeps its rows.
        num_workers: loader processes for each rank; 0 for none.
        collate_fn: as in torch's DataLoader.

        Raises UsageError for unsuitable arguments, and PeerError if the data differ between
        processes.
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
                "run.loader: split_by_node=True is for an IterableDataset, but"
                f" {type(arguments.dataset).__name__} is a map-style data set",
                "leave out split_by_node",
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
        """Return a loader of the batches to evaluate on, in the order of the data set.

        Each sample is given once, to one of the processes, and tensors are on `run.device`.
        Processes may get different numbers of batches. After the loop, `sum` adds up over
        processes, and `gather` collects rows.

        dataset: a map-style data set, or a DataLoader, whose arguments are used.
        batch_size: number of samples per batch on one process.
        num_workers: loader processes for each rank; 0 for none.
        collate_fn: as in torch's DataLoader.

        Raises UsageError and PeerError as `loader` does.
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
        """Name all objects that checkpoints contain, and load the newest checkpoint of the run
        directory.

        Call it once, before `epochs`. A resumed run continues with the very next sample.

        objects: wrapped models, and anything with state_dict and load_state_dict: optimizers,
            schedulers, a GradScaler, objects of your own.

        Returns the number of steps done; 0 without a checkpoint. Raises UsageError for an object
        that cannot be saved, and DataError if the checkpoint belongs to other objects.
        """
        steps = self._open_steps("run.resume")
        if steps.saving is not None:
            raise UsageError(
                "run.resume was called twice",
                "call it once, with all objects. To train several folds, start one command for"
                " each fold, with its own folder; or use processes=1 in each session",
            )
        named, others = check_objects(objects, steps.models)
        living = living_objects()
        refuse_unsaved_schedulers(others, living)
        checkpoints = SessionCheckpoints(
            steps.settings, steps.world, named, others, steps.status, steps.device
        )
        may_differ = steps.models.has_own_batch_norm
        checkpoints.checkpoint_watch.may_differ_in_batch_norm = may_differ
        steps.updates.watch(others)
        if steps.update_record:
            steps.update_record.begin(checkpoints.module, steps.updates.optimizers)
        steps.saving = Saving(
            checkpoints,
            steps.loop,
            steps.loaders,
            steps.updates.gradients,
            steps.numbers,
            steps.exchange_watch,
        )
        steps.saving.copies = UnsavedCopies(steps.models, others.values())
        steps.saving.copies.look_for(living)
        steps.saving.wrappers.look_for(living)
        steps.loop.position = checkpoints.restore(steps.updates.gradients)
        if steps.loop.position.batch:
            warn_of_fractions(others)
        if steps.kept_memory:
            steps.saving.keep_in(steps.kept_memory, steps.models)
        steps.numbers.resume(steps.loop.position.step, checkpoints.numbers)
        steps.status.step = steps.loop.position.step
        return steps.loop.position.step

    def epochs(self, count: int, *, save_every: int = 1, whole: bool = False) -> Iterator[int]:
        """Iterate over the numbers of the remaining epochs, up to count - 1; a new run begins with
        0.

        Counts are those of the whole run: behind `epochs(3)`, `epochs(6)` trains three more. A
        checkpoint is saved after every `save_every` epochs and after the last one. A stop
        (SIGTERM, Ctrl-C) ends all processes after the same step, and saves one too unless `whole`
        is True.

        The global generators of torch, numpy and Python are seeded at the beginning of each epoch,
        at the end of its loop over batches, and at the end of the loop over epochs, with the same
        seed on all processes.

        count: number of epochs in all, including those of earlier loops and before a resume.
        save_every: number of epochs between two checkpoints.
        whole: True saves no checkpoint within an epoch, so that a run resumes at the beginning of
            one. Use it for loops that keep state which no checkpoint contains (hidden states,
            pseudo-labels). An epoch that a stop, a failure or a `break` interrupts is computed
            again.

        Raises UsageError if `resume` was not called, `count` is negative or `save_every` is below
        1; if an earlier loop has done as many epochs, or was left inside of one; and inside of
        another such loop.
        """
        steps = self._open_steps("run.epochs")
        if count < 0 or save_every < 1:
            raise UsageError(
                f"run.epochs: count={count} or save_every={save_every} is too small",
                "use a count of at least 0, and save_every of at least 1",
            )
        return steps.epochs(count, save_every, whole)

    def save(self) -> None:
        """Save an additional checkpoint after this step. Every process must call it, inside of an
        epoch.

        It is written before the next batch or, after the last batch, at the end of the epoch.
        """
        steps = self._open_steps("run.save")
        steps.loop.check_in_epoch("run.save")
        assert steps.saving, "epochs() has seen to it"
        steps.saving.is_due = True

    def mean(
        self,
        losses: Tensor,
        over: float | Tensor | None = None,
        *,
        of: TrainingLoader | None = None,
        accumulate: Optimizer | None = None,
    ) -> Tensor:
        """Return the mean loss over the global batch, for `backward()`.

        Its gradients are exact even if processes have different numbers of samples. A step of an
        optimizer after the `backward()` of any other loss is an error; gradients that a loop sets
        itself must be the same on all processes. The value is the part of this process: the mean
        over processes, `run.sum(loss.item()) / run.processes`, is the mean loss. An average of
        `loss.item()` over steps needs it too, or depends on the number of processes.

        losses: one loss per sample of this process, [n], as with reduction='none'. With `over`, any
            shape.
        over: number of units on this process (tokens, pixels), or a tensor of weights or a mask,
            which is added up. The sum of all losses is divided by the sum of `over`, both over all
            processes; this needs communication.
        of: the loader that gave the samples of `losses`, if several gave a batch in this step.
        accumulate: an optimizer that steps once in several batches. After each batch, gradients are
            those of the mean over all samples (or units of `over`) since its last step.

        Returns a scalar tensor. Raises UsageError outside of the loop over a loader, or if several
        loaders gave a batch and `of` is missing.
        """
        return self._open_steps("run.mean").mean_losses.mean(losses, over, of, accumulate)

    def update_bn(self, loader: TrainingLoader, model: nn.Module) -> None:
        """Compute the statistics of batch norm again, for example for averaged weights.

        It replaces `torch.optim.swa_utils.update_bn`. The statistics are those of the global
        batches of one epoch, for any number of processes. `run.step` does not change. Every process
        must call it, after the loop over the loader.

        loader: an object that `run.loader` returned.
        model: on `run.device`, wrapped or not. It is called with each batch, or with the first
            element of a tuple or list.

        Raises UsageError inside of the loop over the loader, and for another kind of loader.
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

        It appears in metrics.jsonl, on the page of the run, in trackers, and in `ddp-train compare`
        and `watch`. A line is written every `log_every_steps` steps and at the end of each epoch,
        with one number computed over all samples of all processes since the last line. A call
        neither communicates nor waits for the device, and processes may log different names.

        name: slashes make groups, for example vae/kl. A name that begins with `test/` or
            `validation/` is a score, for example test/accuracy.
        values: the numbers of this process: a tensor [n] with one per sample, which are averaged;
            or, with `over`, their sum. Between two steps also a single number that is the same on
            all processes, such as a result of `run.sum`.
        over: the number of samples or tokens that were added up in `values`, or their mask.
        how: `mean`; `sum`, which adds all values up; or `last`, the newest value, which must be the
            same on all processes, as a learning rate is.

        Raises UsageError for a name that metrics.jsonl has already, and, in a step, for the mean of
        a single number without `over`.
        """
        self._open_steps("run.log").log(name, values, over, how)

    def _media_of(self, method: str) -> tuple[Media, int]:
        steps = self._open_steps(f"run.{method}")
        return steps.media, steps.updates.log_step

    @overload
    def sum(self, value: Tensor) -> Tensor: ...
    @overload
    def sum(self, value: float) -> float: ...
    def sum(self, value: Tensor | float) -> Tensor | float:
        """Add up a value over all processes. Every process must call it, on the same line.

        value: a number, or a tensor of the same shape on every process. A process without a batch
            may give 0. Integers are added exactly, other numbers in float64.

        Returns a number, or a tensor if any process gave one. Raises UsageError on all processes if
        their values do not fit together or if they call it from different lines.
        """
        steps = self._open_steps("run.sum")
        steps.exchange_watch.enter(SUM)
        steps.watches.see_sum(SUM, value)
        return sum_over_ranks(value, steps.device)

    def gather(self, rows: Tensor | Sequence[Tensor]) -> Tensor:
        """Collect the rows of all processes, without gradients. Every process must call it.

        After a loop over a test loader, pass the rows of all its batches: the result is then in the
        order of the data set.

        rows: a tensor [n, ...], or a list of tensors to concatenate; n may differ between
            processes. A process without a batch may give an empty list.

        Returns a tensor [all, ...]. Raises UsageError as `sum` does.
        """
        steps = self._open_steps("run.gather")
        steps.exchange_watch.enter(GATHER)
        steps.watches.see_sum(GATHER, rows)
        return gather_over_ranks(rows, steps.device)

    def _open_steps(self, method: str) -> Steps:
        """The steps of the session. Raises UsageError if it is over. method: for the message."""
        if self._steps.is_over:
            raise UsageError(
                f"{method} was called after the session",
                "call it inside of `with ddp_train.session(...) as run:`",
            )
        return self._steps
