"""single, DataParallel and DDP behind one short protocol, so that the loop never asks which one it
has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.distributed.process_group import averaged_buffers, mean_later
from ddp_train.distributed.replicas import check_same_weights
from ddp_train.distributed.training_step import TrainingStep
from ddp_train.models.put_back import leaving_nothing
from ddp_train.parallel.compiler_graphs import buckets_by_flops, choose_graphs
from ddp_train.parallel.gradient_check import GradientCheck
from ddp_train.parallel.naming_ddp import (
    NamingDdp,
    ddp_arguments,
    register_comm_hook,
    with_bucket_size,
)
from ddp_train.parallel.sync_batch_norm import synchronised_on
from ddp_train.tasks.logged_numbers import no_numbers
from ddp_train.tasks.task import ModelWithTask

NO_GATHER = (
    "strategy=dp: ddp_train.all_gather does not see the samples of other GPUs; use strategy=ddp"
)


class Strategy(Protocol):
    """The way in which the processes of a run share one model: one object on each."""

    allow_missing_grads: bool
    """A parameter may be without a gradient in some steps."""
    buffers_differ: bool
    """Each process has buffers of its own, batch norm's statistics for example."""
    replicates: bool
    """Every process holds every weight and every moment of the optimizer.

    A strategy that shards them answers False, and each of these must ask it: the weights of a
    checkpoint (`full_weights`) and their loading (`reader.load_model`), the optimizer's state
    (`Stepper.state`), the flag of a non-finite gradient (`NonFiniteCheck`; `mean_of_units` reaches
    all ranks in each step), evaluations, whose ranks may have different numbers of batches
    (`evaluation_batches`), and what each rank keeps of a step (`live_state.state_of`).
    """

    def place(self, module: ModelWithTask) -> ModelWithTask:
        """Move the module to its device and convert it as the strategy wants it.

        To be called before the optimizer is built.
        """
        ...

    def wrap(
        self, module: ModelWithTask, step_flops: Callable[[], int | None] | None = None
    ) -> nn.Module:
        """The model as the training step calls it.

        Evaluation and checkpoints use the module itself, which has the plain names.

        To be called again when other parameters require gradients.

        step_flops: counts the floating-point operations of a step on this process; None, or a
            result of None, if they are unknown.
        """
        ...

    def warm_up(self, first_batch: Callable[[], Batch]) -> None:
        """Run what must run once after `wrap` and before training starts or resumes.

        first_batch: as training sees it.
        """
        ...

    def sync_gradients(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        """A context around forward and backward of a micro-batch.

        Gradients are exchanged in that of the last micro-batch of a step; in those before it they
        only add up on this process.
        """
        ...

    def mean_of_units(self, scaled: Tensor) -> Callable[[], Tensor]:
        """Start to reduce a step's numbers of units as its gradients are reduced.

        For a mean over units whose number a process learns late.

        scaled: of each micro-batch of the step on this process its number of units times its scale,
            float64 [n].

        Returns a function that waits for the scalar by which gradients must be divided, the same on
        all processes.
        """
        ...

    def check_gradients(self) -> None:
        """Raise ModelError if a parameter has no gradient and must have one.

        To be called after the backward passes of a step.
        """
        ...

    def full_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """All weights and buffers under the model's own names, not copied. A collective."""
        ...

    def averaged(self, module: ModelWithTask) -> AbstractContextManager[Tensor]:
        """A context in which buffers are the average over all processes: for an evaluation, or a
        checkpoint.

        Yields what each process had, and has again afterwards: [processes, n], float64.
        """
        ...

    def check_replicas(self, module: ModelWithTask) -> None:
        """Raise ModelError if the weights of the processes have come apart. A collective."""
        ...


class Replicas:
    """The common part of strategies whose processes hold all weights."""

    allow_missing_grads = False
    replicates = True

    def __init__(self, device: str, sync_bn: bool = False) -> None:
        """
        sync_bn: batch norm takes its statistics over the samples of all processes.
        """
        self.device = device
        self.sync_bn = sync_bn

    def place(self, module: ModelWithTask) -> ModelWithTask:
        if self.sync_bn:
            module.model = synchronised_on(self.device, module.model)
        return module.to(self.device)

    def warm_up(self, first_batch: Callable[[], Batch]) -> None:
        """Nothing to do."""

    def check_gradients(self) -> None:
        """Nothing to check: as in plain PyTorch, none is needed."""

    def full_weights(self, model: nn.Module) -> dict[str, Tensor]:
        return dict(model.state_dict())

    def check_replicas(self, module: ModelWithTask) -> None:
        check_same_weights(module)


class Single(Replicas):
    """One process, one device."""

    buffers_differ = False

    def __init__(self, device: str, sync_bn: bool = False, needs_all_gradients: bool = False):
        """
        sync_bn: convert batch norm as DDP does, for the same bits.
        needs_all_gradients: a step that does not use all parameters is an error, as with DDP.
        """
        super().__init__(device, sync_bn)
        self.needs_all_gradients = needs_all_gradients
        self.gradient_check: GradientCheck | None = None

    def wrap(
        self, module: ModelWithTask, step_flops: Callable[[], int | None] | None = None
    ) -> nn.Module:
        if self.gradient_check:
            self.gradient_check.release()
        if self.needs_all_gradients:
            self.gradient_check = GradientCheck(module)
        return module

    def sync_gradients(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        if self.gradient_check and micro_batch.is_last:
            self.gradient_check.reached.clear()
        return TrainingStep(micro_batch.num_real > 0, micro_batch.is_last, share=micro_batch)

    def mean_of_units(self, scaled: Tensor) -> Callable[[], Tensor]:
        return scaled.sum

    def check_gradients(self) -> None:
        if self.gradient_check:
            self.gradient_check.check()

    def averaged(self, module: ModelWithTask) -> AbstractContextManager[Tensor]:
        return contextlib.nullcontext(torch.empty(1, 0))


class DataParallel(Single):
    """One process, all visible GPUs: inputs are scattered, the model replicated, losses gathered in
    every step."""

    def wrap(
        self, module: ModelWithTask, step_flops: Callable[[], int | None] | None = None
    ) -> nn.Module:
        module.has_replicas = True
        return nn.DataParallel(module)

    def sync_gradients(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        several = self.device.startswith("cuda") and torch.cuda.device_count() > 1
        return TrainingStep(
            is_last=micro_batch.is_last,
            refused=NO_GATHER if several else "",
            share=micro_batch,
            has_replicas=several,
        )


class DistributedDataParallel(Replicas):
    """One process per device; gradients are averaged while the backward pass still runs, or behind
    it."""

    buffers_differ = True

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
        """
        comm_hook: none, fp16, bf16 or powersgd.
        fixed_buckets: DDP's final bucket layout from step 0 on, see `warm_up_ddp_buckets`.
        buckets: see `with_bucket_size`, or by_flops (`buckets_by_flops`); a compiled model is cut
            into a graph for each.
        options: those of torch's DDP, by torch's names.
        """
        super().__init__(device, sync_bn)
        self.comm_hook = comm_hook
        self.powersgd_rank = powersgd_rank
        self.fixed_buckets = fixed_buckets
        self.buckets = buckets
        self.options = options
        self.allow_missing_grads = bool(options.get("find_unused_parameters", False))
        self.wrapped: NamingDdp | None = None

    def wrap(
        self, module: ModelWithTask, step_flops: Callable[[], int | None] | None = None
    ) -> nn.Module:
        buckets = self.buckets
        if buckets == "by_flops":
            buckets = buckets_by_flops(module, step_flops, self.device)
        options = with_bucket_size(self.options, buckets, self.comm_hook)
        if self.wrapped:
            # Until the garbage collector takes it, its hooks would send gradients too.
            self.wrapped._remove_autograd_hooks()
            # Weights are alike by now, and buffers are each rank's own.
            options["init_sync"] = False
        self.wrapped = NamingDdp(module, **ddp_arguments(self.device, **options))
        choose_graphs(self.wrapped)
        register_comm_hook(self.wrapped, self.comm_hook, self.powersgd_rank)
        return self.wrapped

    def warm_up(self, first_batch: Callable[[], Batch]) -> None:
        wrapped = self.wrapped
        if self.fixed_buckets and wrapped:
            batch = first_batch()
            module = wrapped.module
            roots = {"model": module.model, "task": module.task}
            warm_up_ddp_buckets(roots, lambda: wrapped(batch.data)[0].sum())

    def sync_gradients(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        step = TrainingStep(micro_batch.num_real > 0, micro_batch.is_last, share=micro_batch)
        return step if micro_batch.is_last else self._without_exchange(step)

    @contextlib.contextmanager
    def _without_exchange(self, step: TrainingStep) -> Iterator[None]:
        assert self.wrapped
        with step, self.wrapped.no_sync():
            yield

    def mean_of_units(self, scaled: Tensor) -> Callable[[], Tensor]:
        return mean_later(scaled.sum())

    def averaged(self, module: ModelWithTask) -> AbstractContextManager[Tensor]:
        return averaged_buffers(module)


def warm_up_ddp_buckets(roots: Mapping[str, Any], loss: Callable[[], Tensor]) -> None:
    """Run two forward and backward passes that leave nothing behind but the final layout of DDP's
    buckets.

    DDP lays out its buckets anew after its first iteration, in the order in which gradients came.
    At three ranks and more the layout decides in which order numbers are added: without these
    passes the first step after every start would differ, in the last bits, from the same step of a
    run that was not interrupted. On a GPU so would the norm of gradients that are views into the
    buckets: torch's kernel adds up in another order where one begins at no multiple of 16 bytes
    (ATen/native/cuda/ForeachReduceOp.cu).

    roots: the objects that are called, by their names.
    loss: makes a scalar of one forward pass of the wrapped model.
    """
    with leaving_nothing("the warm-up of DDP", roots), no_numbers():
        for _ in range(2):
            loss().backward()
