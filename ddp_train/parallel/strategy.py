"""single, DataParallel and DDP behind one short protocol, so that the loop never asks which one it
has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.distributed.process_group import averaged_buffers, mean_later
from ddp_train.distributed.replicas import check_same_weights
from ddp_train.distributed.training_step import TrainingStep, training_step
from ddp_train.parallel.compiled import buckets_by_flops, choose_graphs
from ddp_train.parallel.naming_ddp import (
    NamingDdp,
    ddp_arguments,
    register_comm_hook,
    with_bucket_size,
)
from ddp_train.parallel.sync_batch_norm import SyncBatchNorm, synchronised
from ddp_train.tasks.task import ModelWithTask


def unknown() -> int | None:
    """The count where nobody counts: None."""


class Strategy(Protocol):
    """How the processes of a run share one model. One object per run, on each process."""

    allow_missing_grads: bool
    """Whether a parameter may be without a gradient in some steps."""
    buffers_differ: bool
    """Whether each process has buffers of its own, batch norm's statistics for example."""
    replicates: bool
    """Whether every process holds every weight and every moment of the optimizer.

    What differs where it does not hold: the state for a checkpoint (rank 0 writes its own), its
    loading, the flag of a non-finite gradient (a sum that reaches all), evaluations with different
    numbers of batches on the ranks, and recovery from a survivor's memory.
    """

    def place(self, module: ModelWithTask) -> ModelWithTask:
        """The module on its device, converted as the strategy wants it. Before the optimizer is
        built."""
        ...

    def wrap(
        self, module: ModelWithTask, step_flops: Callable[[], int | None] = unknown
    ) -> nn.Module:
        """What the training step calls. Evaluation and checkpoints use the module itself: it has
        the plain names. To be called again when other parameters want gradients. step_flops: counts
        the floating-point operations of a step on this process, if it can."""
        ...

    def warm_up(self, first_batch: Callable[[], Batch]) -> None:
        """What must run once after `wrap` and before training starts or resumes. first_batch: as
        training sees it."""
        ...

    def sync_gradients(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch. Gradients are exchanged in that of the last
        micro-batch of a step; in those before it they only add up on this process."""
        ...

    def mean_of_units(self, scaled: Tensor) -> Callable[[], Tensor]:
        """Begins to do to numbers what is done to gradients, for a mean over units whose number a
        process learns late.

        scaled: of each micro-batch of a step on this process its number of units times its scale,
        float64 [n]. Returns a function that gives the scalar by which gradients must be divided, on
        all processes the same.
        """
        ...

    def check_gradients(self) -> None:
        """After the backward passes of a step. Raises ModelError if a parameter has no gradient and
        must have one."""
        ...

    def averaged(self, module: ModelWithTask) -> AbstractContextManager[Tensor]:
        """Inside, buffers are the average over all processes: for an evaluation, or a checkpoint.

        Yields what each process had, and has again afterwards: [processes, n], float64.
        """
        ...

    def check_replicas(self, module: ModelWithTask) -> None:
        """Raise ModelError if the weights of the processes have come apart. A collective."""
        ...


class Single:
    """One process, one device."""

    allow_missing_grads = False
    buffers_differ = False
    replicates = True

    def __init__(self, device: str) -> None:
        self.device = device

    def place(self, module: ModelWithTask) -> ModelWithTask:
        return module.to(self.device)

    def wrap(
        self, module: ModelWithTask, step_flops: Callable[[], int | None] = unknown
    ) -> nn.Module:
        return module

    def warm_up(self, first_batch: Callable[[], Batch]) -> None:
        """Nothing to do."""

    def sync_gradients(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        return training_step(True, micro_batch.is_last)

    def mean_of_units(self, scaled: Tensor) -> Callable[[], Tensor]:
        return scaled.sum

    def check_gradients(self) -> None:
        """As in plain PyTorch, none is needed."""

    def averaged(self, module: ModelWithTask) -> AbstractContextManager[Tensor]:
        return contextlib.nullcontext(torch.empty(1, 0))

    def check_replicas(self, module: ModelWithTask) -> None:
        check_same_weights(module)


class DataParallel(Single):
    """One process, all visible GPUs: inputs are scattered, the model replicated, losses gathered in
    every step."""

    def wrap(
        self, module: ModelWithTask, step_flops: Callable[[], int | None] = unknown
    ) -> nn.Module:
        module.gathered = True
        return nn.DataParallel(module)

    def sync_gradients(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        refused = (
            "strategy=dp: ddp_train.all_gather does not see the samples of other GPUs; use"
            " strategy=ddp"
        )
        several = self.device.startswith("cuda") and torch.cuda.device_count() > 1
        return TrainingStep(is_last=micro_batch.is_last, refused=refused if several else "")


class DistributedDataParallel:
    """One process per device; gradients are averaged while the backward pass still runs, or behind
    it."""

    buffers_differ = True
    replicates = True
    exchanges = True
    """Whether gradients go to other processes."""

    def __init__(
        self,
        device: str,
        sync_bn: bool = False,
        comm_hook: str = "none",
        powersgd_rank: int = 1,
        fixed_buckets: bool = False,
        buckets: str = "default",
        **options: Any,
    ) -> None:
        """comm_hook: none, fp16, bf16 or powersgd. fixed_buckets: DDP's final bucket layout from
        step 0 on, see `warm_up_ddp_buckets`. buckets: see `with_bucket_size`, or by_flops
        (`buckets_by_flops`); a compiled model is cut into a graph for each. options: those of
        torch's DDP, by torch's names."""
        self.device = device
        self.sync_bn = sync_bn
        self.comm_hook = comm_hook
        self.powersgd_rank = powersgd_rank
        self.fixed_buckets = fixed_buckets
        self.buckets = buckets
        self.options = options
        self.allow_missing_grads = bool(options.get("find_unused_parameters", False))
        self.sync_batch_norms: list[SyncBatchNorm] = []

    def place(self, module: ModelWithTask) -> ModelWithTask:
        if self.sync_bn:
            on_gpu = self.device.startswith(
                "cuda"
            )  # torch's has kernels for GPUs, and refuses CPU tensors
            module.model = (nn.SyncBatchNorm.convert_sync_batchnorm if on_gpu else synchronised)(
                module.model
            )
        return module.to(self.device)

    def wrap(
        self, module: ModelWithTask, step_flops: Callable[[], int | None] = unknown
    ) -> nn.Module:
        self.find_sync_batch_norms(module)
        if self.buckets == "by_flops":
            buckets = buckets_by_flops(module, step_flops, self.device)
        else:
            buckets = self.buckets
        options = with_bucket_size(self.options, buckets, self.comm_hook)
        if hasattr(self, "wrapped"):
            # until the garbage collector takes it, they would send gradients too
            self.wrapped._remove_autograd_hooks()
            options["init_sync"] = (
                False  # weights are alike by now, and buffers are each rank's own
            )
        self.wrapped = NamingDdp(module, **ddp_arguments(self.device, **options))
        choose_graphs(self.wrapped)
        register_comm_hook(self.wrapped, self.comm_hook, self.powersgd_rank)
        return self.wrapped

    def find_sync_batch_norms(self, module: nn.Module) -> None:
        self.sync_batch_norms = [
            layer for layer in module.modules() if isinstance(layer, SyncBatchNorm)
        ]

    def warm_up(self, first_batch: Callable[[], Batch]) -> None:
        if self.fixed_buckets:
            batch = first_batch()
            warm_up_ddp_buckets(self.wrapped, lambda: self.wrapped(batch.data)[0].sum())

    def sync_gradients(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        counts = micro_batch.num_real > 0
        is_last = micro_batch.is_last
        for layer in self.sync_batch_norms:
            layer.counts = counts
        step = training_step(counts, is_last)
        if is_last or not self.exchanges:
            return step
        return self._without_exchange(step)

    @contextlib.contextmanager
    def _without_exchange(self, step: TrainingStep) -> Iterator[None]:
        with step, self.wrapped.no_sync():
            yield

    def mean_of_units(self, scaled: Tensor) -> Callable[[], Tensor]:
        return mean_later(scaled.sum())

    def check_gradients(self) -> None:
        """torch's DDP does, in the next forward pass."""

    def averaged(self, module: ModelWithTask) -> AbstractContextManager[Tensor]:
        return averaged_buffers(module)

    def check_replicas(self, module: ModelWithTask) -> None:
        check_same_weights(module)


def warm_up_ddp_buckets(wrapped: nn.Module, loss: Callable[[], Tensor]) -> None:
    """Two forward and backward passes that leave nothing behind but the final layout of DDP's
    buckets. loss: a scalar of one forward pass of `wrapped`.

    DDP lays out its buckets anew after its first iteration, in the order in which gradients came.
    At three ranks and more the layout decides in which order numbers are added: without these
    passes the first step after every start would differ, in the last bits, from the same step of a
    run that was not interrupted. On a GPU so would the norm of gradients that are views into the
    buckets: torch's kernel adds up in another order where one begins at no multiple of 16 bytes
    (ATen/native/cuda/ForeachReduceOp.cu).
    """
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    for _ in range(2):
        loss().backward()
    wrapped.zero_grad(set_to_none=True)
    wrapped.load_state_dict(before)
