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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.rng import StepSeed
from ddp_train.distributed.process_group import from_all_ranks, send_from_leader
from ddp_train.distributed.training_step import TrainingStep
from ddp_train.parallel.strategy import Replicas
from ddp_train.tasks.task import ModelWithTask

NO_GATHER = (
    "strategy=ordered: computes each virtual shard separately, so ddp_train.all_gather would see"
    " one shard only; use strategy=ddp"
)


class Tree:
    """The sum of a power of two of tensors, pair by pair, as they come: 8 of them need room for
    4."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.leaves = 0

    def add(self, leaf: Tensor) -> None:
        """Add the next leaf, from left to right. It may be overwritten."""
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


class OrderedReduction(Replicas):
    """Gradients and the changes of buffers, added up over the shards of a global batch in a fixed
    order."""

    allow_missing_grads = True
    buffers_differ = False

    def __init__(self, device: str, seed: int, virtual_shards: int) -> None:
        super().__init__(device)
        self.virtual_shards = virtual_shards
        self.seeds = [StepSeed(seed, shard, device) for shard in range(virtual_shards)]
        self.tree = Tree()

    def wrap(
        self, module: ModelWithTask, step_flops: Callable[[], int | None] | None = None
    ) -> nn.Module:
        self.parameters = [
            parameter for parameter in module.parameters() if parameter.requires_grad
        ]
        self.buffers = list(module.buffers())
        send_from_leader([*module.parameters(), *self.buffers])
        self.dtype = torch.float32
        for parameter in self.parameters:
            self.dtype = torch.promote_types(self.dtype, parameter.dtype)
        return module

    @contextlib.contextmanager
    def sync_gradients(self, micro_batch: MicroBatch) -> Iterator[None]:
        if not self.tree.leaves:
            self.before = [buffer.clone() for buffer in self.buffers]
        # In place of the step's seed, which knows the rank.
        self.seeds[micro_batch.shard_index](micro_batch.step)
        try:
            with TrainingStep(micro_batch.num_real > 0, refused=NO_GATHER, share=micro_batch):
                yield
        except BaseException:
            # A peer is gone: what is saved then are the buffers of the last whole step.
            self._restore_buffers()
            raise
        contribution = self._take_contribution()
        if not micro_batch.num_real:  # a stand-in took the place of samples
            contribution.zero_()
        self.tree.add(contribution)
        if micro_batch.is_last:
            self._finish()

    def mean_of_units(self, scaled: Tensor) -> Callable[[], Tensor]:
        # One number a shard, in their order: one sum on any number of ranks.
        units_of_shards = from_all_ranks(scaled).flatten()
        return units_of_shards.sum

    def averaged(self, module: ModelWithTask) -> AbstractContextManager[Tensor]:
        return contextlib.nullcontext(torch.empty(1, 0))

    def _restore_buffers(self) -> None:
        for buffer, before in zip(self.buffers, self.before, strict=True):
            buffer.copy_(before)

    def _take_contribution(self) -> Tensor:
        """Gradients and changes of buffers by one shard, as one flat tensor.

        The model is left as it was before the shard.
        """
        used = [parameter.grad is not None for parameter in self.parameters]
        parts = [torch.tensor([1, *used], dtype=self.dtype, device=self.device)]
        for parameter in self.parameters:
            gradient = parameter.grad
            parameter.grad = None
            parts.append(torch.zeros_like(parameter) if gradient is None else gradient)
        for buffer, before in zip(self.buffers, self.before, strict=True):
            parts.append((buffer.double() - _finite(before)).to(self.dtype))
        self._restore_buffers()
        return torch.cat([part.detach().flatten() for part in parts])

    def _finish(self) -> None:
        """Exchange the sums, and give gradients and buffers to the model, on all processes the same
        bits."""
        tree = Tree()
        for subtree in from_all_ranks(self.tree.total()):
            tree.add(subtree)
        self.tree = Tree()
        count = len(self.parameters)
        sizes = [tensor.numel() for tensor in (*self.parameters, *self.buffers)]
        flags, *sums = tree.total().split([1 + count, *sizes])
        shards, *used = flags.tolist()
        for parameter, gradient, uses in zip(self.parameters, sums[:count], used, strict=True):
            # A parameter that no process used keeps no gradient, as without processes.
            if uses:
                # empty_like keeps the memory format, channels_last for one: fused optimizers ask
                # for it.
                parameter.grad = torch.empty_like(parameter).copy_(gradient.view_as(parameter))
        for buffer, change in zip(self.buffers, sums[count:], strict=True):
            buffer.copy_(_finite(buffer) + change.double().view_as(buffer) / shards)


def _finite(buffer: Tensor) -> Tensor:
    """A buffer in float64 with 0 where it is infinite.

    Changes are counted from there, so that an infinity stays one, and a largest value so far, which
    begins at -inf, can leave it.
    """
    return torch.where(buffer.isfinite(), buffer, 0).double()
