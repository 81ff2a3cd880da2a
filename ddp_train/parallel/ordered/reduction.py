"""Audit mode: the same bits on 1, 2, 4, 8 ... processes. `strategy=ordered`.

A sum of floating-point numbers depends on its order, and a matrix product on how many samples it
holds. So each global batch is cut into the same `strategy.virtual_shards` shards whatever the
number of processes, each shard is computed alone, and their gradients are added up in the order of
one fixed binary tree. A process computes the shards of one subtree; all processes exchange the sums
of their subtrees and add up the rest, each for itself. With 8 shards on 2 processes:

    shards     0   1   2   3  |  4   5   6   7
                \\ /     \\ /   |   \\ /     \\ /
    process 0     \\_____/     |     \\_____/    process 1
                      \\_______|________/          both

Like gradients go the changes of buffers, batch norm's running statistics for example: each shard
starts from the same values, and their mean change is what remains. In-model randomness is keyed by
shard instead of rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.rng import StepSeed
from ddp_train.distributed.process_group import from_all_ranks, send_from_leader
from ddp_train.distributed.training_step import TrainingStep
from ddp_train.parallel.strategy import Single, unknown
from ddp_train.tasks.task import ModelWithTask

NO_GATHER = (
    "strategy=ordered: computes each virtual shard by itself, and ddp_train.all_gather would see"
    " that shard alone; use strategy=ddp"
)


class Tree:
    """The sum of a power of two of tensors, pair by pair, as they come: 8 of them need room for
    4."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.leaves = 0

    def add(self, leaf: Tensor) -> None:
        """The next leaf, from left to right. It may be overwritten."""
        self.sums.append(leaf)
        self.leaves += 1
        whole = self.leaves
        while whole % 2 == 0:  # a subtree is complete: its right half joins its left
            right = self.sums.pop()
            self.sums[-1].add_(right)
            whole //= 2

    def total(self) -> Tensor:
        """The sum of all leaves, a power of two of them."""
        (total,) = self.sums
        return total


class OrderedReduction(Single):
    """Gradients and the changes of buffers, added up over the shards of a global batch in a fixed
    order."""

    allow_missing_grads = True
    """Only DDP demands that every shard uses every parameter."""

    def __init__(self, device: str, seed: int, virtual_shards: int) -> None:
        super().__init__(device)
        self.virtual_shards = virtual_shards
        self.seeds = [StepSeed(seed, shard, device) for shard in range(virtual_shards)]
        self.tree = Tree()

    def wrap(
        self, module: ModelWithTask, step_flops: Callable[[], int | None] = unknown
    ) -> nn.Module:
        self.parameters = [
            parameter for parameter in module.parameters() if parameter.requires_grad
        ]
        self.buffers = list(module.buffers())
        send_from_leader([*module.parameters(), *self.buffers])
        self.dtype = functools.reduce(
            torch.promote_types, (p.dtype for p in self.parameters), torch.float32
        )
        return module

    @contextlib.contextmanager
    def sync_gradients(self, micro_batch: MicroBatch) -> Iterator[None]:
        if not self.tree.leaves:
            self.before = [buffer.clone() for buffer in self.buffers]
        self.seeds[micro_batch.shard_index](
            micro_batch.step
        )  # in place of the step's, which knows the rank
        try:
            with TrainingStep(refused=NO_GATHER):
                yield
        except (
            BaseException
        ):  # a peer is gone: what is saved then are the buffers of the last whole step
            for buffer, before in zip(self.buffers, self.before, strict=True):
                buffer.copy_(before)
            raise
        self.tree.add(self._take(counts=micro_batch.num_real > 0))
        if micro_batch.is_last:
            self._finish()

    def mean_of_units(self, scaled: Tensor) -> Callable[[], Tensor]:
        of_shards = from_all_ranks(
            scaled
        ).flatten()  # one number a shard, in their order: one sum on any number of ranks
        return of_shards.sum

    def _take(self, counts: bool) -> Tensor:
        """What a shard contributes, one flat tensor; the model is left as it was before the shard.
        Exact zeros if the shard has no samples: a stand-in took its place."""
        used = [parameter.grad is not None for parameter in self.parameters]
        parts = [torch.tensor([1, *used], dtype=self.dtype, device=self.device)]
        for parameter in self.parameters:
            gradient = parameter.grad
            parameter.grad = None
            parts.append(torch.zeros_like(parameter) if gradient is None else gradient)
        for buffer, before in zip(self.buffers, self.before, strict=True):
            parts.append((buffer.double() - _finite(before)).to(self.dtype))
            buffer.copy_(before)
        flat = torch.cat([part.detach().flatten() for part in parts])
        return flat if counts else flat.zero_()

    def _finish(self) -> None:
        """Exchanges the sums, and gives gradients and buffers to the model, on all processes the
        same bits."""
        tree = Tree()
        for subtree in from_all_ranks(self.tree.total()):
            tree.add(subtree)
        self.tree = Tree()
        tensors = [*self.parameters, *self.buffers]
        flags, *sums = tree.total().split(
            [1 + len(self.parameters), *(tensor.numel() for tensor in tensors)]
        )
        shards, *used = flags.tolist()
        gradients = sums[: len(self.parameters)]
        changes = sums[len(self.parameters) :]
        for parameter, gradient, count in zip(self.parameters, gradients, used, strict=True):
            if (
                count
            ):  # on any process; a parameter that none used keeps no gradient, as without processes
                # empty_like keeps the memory format, channels_last for one: fused optimizers ask
                # for it
                parameter.grad = torch.empty_like(parameter).copy_(gradient.view_as(parameter))
        for buffer, change in zip(self.buffers, changes, strict=True):
            buffer.copy_(_finite(buffer) + change.double().view_as(buffer) / shards)


def _finite(buffer: Tensor) -> Tensor:
    """What the changes of a buffer are counted from: 0 where it is infinite, so that an infinity
    stays one, and a largest value so far, which begins at -inf, can leave it."""
    return torch.where(buffer.isfinite(), buffer, 0).double()
