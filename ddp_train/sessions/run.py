"""What the user's loop calls: `with ddp_train.session(...) as run`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import Tensor, nn

from ddp_train.distributed.exchange import tensors_from_all_ranks
from ddp_train.distributed.process_group import ranks, total
from ddp_train.sessions.loader import (
    TestLoader,
    TrainingLoader,
    common_digests,
    options_of,
    source_of,
)
from ddp_train.sessions.session_checkpoints import SessionCheckpoints, check_objects
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.steps import Steps
from ddp_train.sessions.wrapped import Wrapped

Collate = Callable[[list[Any]], Any]


class Run:
    """One process of a run. Every process calls the same methods in the same order."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._has_loader = False

    @property
    def rank(self) -> int:
        """The number of this process among all."""
        return self._steps.world.rank

    @property
    def processes(self) -> int:
        """How many there are, over all hosts."""
        return self._steps.world.size

    @property
    def device(self) -> torch.device:
        """Of this process; batches come there, and the model of `wrap` is there."""
        return torch.device(self._steps.device)

    @property
    def step(self) -> int:
        """Batches that are done, in all epochs."""
        return self._steps.position.step

    def wrap(self, model: nn.Module, *, sync_batch_norm: bool = True, **options: Any) -> Wrapped:
        """The model on this process's device, whose gradients are the mean over all processes
        (DDP). Before its optimizer is built.

        sync_batch_norm: batch norm over the samples of all processes, as one process would have
        them; False: each has its own, which is faster and depends on their number. options: of
        torch's DistributedDataParallel, by torch's names (find_unused_parameters, bucket_cap_mb,
        gradient_as_bucket_view ...). Raises UsageError if it is called twice.
        """
        self._check("run.wrap")
        steps = self._steps
        if steps.model is not None or isinstance(model, Wrapped):
            raise UsageError(
                "run.wrap was called twice: a session trains one model",
                "put the models that are trained together into one nn.Module; those that are not"
                " need no wrap",
            )
        steps.model = Wrapped(model, steps.device, self.processes, sync_batch_norm, options)
        steps.model.register_forward_pre_hook(steps.see_forward)
        return steps.model

    def loader(
        self,
        dataset: Any,
        *,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
    ) -> TrainingLoader:
        """The batches to train on, in place of DataLoader and DistributedSampler. Each epoch has
        each sample once, in an order of its own; the global batches are the same for any number of
        processes, which share each as evenly as possible; nothing is padded or left out. Iterated
        inside of `epochs`, once in each.

        dataset: map-style. global_batch_size: samples of a step over all processes. num_workers:
        processes that prepare batches, for each rank; 0: none. collate_fn: as torch's. What samples
        draw at random (torch's, numpy's and Python's global generators) depends on seed, epoch and
        sample alone. Tensors come on `run.device`.

        Raises UsageError for other data, and PeerError if they are not the same for all processes.
        """
        self._check("run.loader")
        if self._has_loader:
            raise UsageError(
                "run.loader was called twice: a session trains on one loader",
                "score with run.test_loader",
            )
        if not isinstance(global_batch_size, int) or global_batch_size < 1:
            raise UsageError(
                "run.loader: global_batch_size is"
                f" {'missing' if global_batch_size is None else global_batch_size}",
                "run.loader(dataset, global_batch_size=64): the samples of a step, over all"
                " processes together",
            )
        steps = self._steps
        source = source_of(dataset, steps.settings.seed, collate_fn, "run.loader")
        data = common_digests(source, steps.device, "run.loader")
        loader = TrainingLoader(
            steps, source, global_batch_size, shuffle, options_of(steps.device, num_workers)
        )
        steps.loader_facts = {**loader.facts, "data": data}
        self._has_loader = True
        return loader

    def test_loader(
        self,
        dataset: Any,
        *,
        batch_size: int,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
    ) -> TestLoader:
        """The batches of a data set that is scored: each sample once, on one process, in order. Add
        up over processes with `sum`, or take rows together with `gather`. batch_size: samples of a
        batch on one process."""
        self._check("run.test_loader")
        source = source_of(dataset, self._steps.settings.seed, collate_fn, "run.test_loader")
        common_digests(source, self._steps.device, "run.test_loader")
        return TestLoader(
            self._steps, source, batch_size, options_of(self._steps.device, num_workers)
        )

    def resume(self, **objects: Any) -> int:
        """Names what a checkpoint consists of, and loads the newest one of the run directory if
        there is one: it then resumes at the very next sample. Returns the steps that are done.

        objects: the model of `wrap`, and whatever has state_dict and load_state_dict: optimizers,
        schedulers, a GradScaler, objects of your own. Raises UsageError for what cannot be saved,
        and DataError if the checkpoint is of something else.
        """
        self._check("run.resume")
        steps = self._steps
        if steps.checkpoints is not None:
            raise UsageError("run.resume was called twice", "call it once, with all objects")
        others = check_objects(objects, steps.model)
        assert steps.model, "check_objects has seen to it"
        steps.checkpoints = SessionCheckpoints(
            steps.settings, steps.world, steps.model, others, steps.status
        )
        steps.optimizers = {id(one) for one in others.values()}
        steps.position = steps.checkpoints.restore(steps.device)
        steps.status.step = steps.position.step
        return steps.position.step

    def epochs(self, count: int, *, save_every: int = 1) -> Iterator[int]:
        """The numbers of the epochs that are left, from 0 to `count`. A checkpoint is saved after
        every `save_every` epochs and after the last one. A stop (SIGTERM, Ctrl-C) ends the process
        between two steps, or two epochs."""
        self._check("run.epochs")
        if count < 0 or save_every < 1:
            raise UsageError(
                f"run.epochs: count={count}, save_every={save_every}", "use whole numbers above 0"
            )
        return self._steps.epochs(count, save_every)

    def save(self) -> None:
        """Saves a checkpoint as soon as this step is done: before the next batch or, after the last
        one, at the end of the epoch. On all processes alike."""
        self._check("run.save")
        self._steps.open_epoch("run.save")
        self._steps.is_save_due = True

    def mean(self, losses: Tensor, over: float | Tensor | None = None) -> Tensor:
        """The mean loss over the global batch, for `backward()`: a scalar whose gradients are exact
        however unevenly the batch is shared. A step of the optimizer without it is an error.

        losses: one for each sample of this process, [n], as losses with reduction='none' are. With
        `over` any shape: their sum is divided by the sum of `over` over all processes (tokens,
        pixels, weights that count here), which takes an exchange. The value is this process's part:
        its mean over the processes is the mean loss.
        """
        self._check("run.mean")
        return self._steps.mean(losses, over)

    @overload
    def sum(self, value: Tensor) -> Tensor: ...
    @overload
    def sum(self, value: float) -> float: ...
    def sum(self, value: Tensor | float) -> Tensor | float:
        """The sum over all processes, for scores: a number, or a tensor of the same shape on each;
        fractions are added up in float64. Every process must call it."""
        self._check("run.sum")
        self._steps.warn_of_sum()
        exact = (
            torch.float64 if isinstance(value, float) else None
        )  # as_tensor would make a float float32
        tensor = torch.as_tensor(value, dtype=exact, device=self._steps.device).detach()
        wide = torch.float64 if tensor.is_floating_point() else torch.int64
        added = total(tensor.to(wide, copy=True))
        return added if isinstance(value, Tensor) else added.item()

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all processes, [n, ...] -> [all, ...], without gradients; n may differ. Of
        all batches of a test loader together they are in the order of the data set. Every process
        must call it."""
        self._check("run.gather")
        if ranks() == 1:
            return rows.detach()
        parts = tensors_from_all_ranks(None, [rows], self._steps.device)
        return torch.cat([part for _, (part,) in parts])

    def _check(self, what: str) -> None:
        if self._steps.is_over:
            raise UsageError(f"{what} was called after the session", "call it inside of the `with`")
