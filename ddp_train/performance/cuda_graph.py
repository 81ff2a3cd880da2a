"""A whole training step as one CUDA graph: forward, loss, backward, exchange, check, optimizer.

Launched one by one, the hundreds of kernels of a small model's step take the host longer than they
take the GPU. A graph launches them all at once (CUDA semantics, "CUDA Graphs", whole-network
capture). It is captured for one shape of batch; others, the short last batch of an epoch, take
their step kernel by kernel.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.errors import LaunchError, is_out_of_memory
from ddp_train.models.python_state import look_through
from ddp_train.optim.nan_guard import DeviceNonFiniteCheck
from ddp_train.optim.stepper import Stepper
from ddp_train.performance.worth_capturing import CaptureTrial, kept_in_python
from ddp_train.tensor_tree import map_tensors, tensors
from ddp_train.text import first_line

log = logging.getLogger(__name__)

WARM_UP_STEPS = 11
"""Taken kernel by kernel before the capture: DDP needs so many (CUDA semantics, "Usage with
DistributedDataParallel"), cuDNN and the compiler choose their kernels in them, and the optimizer
makes its state."""


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """A context in which work is queued on another stream, after what is queued here; what is
    queued here later comes after it.

    DDP must be built, warmed up and captured on one stream that is not the default one.

    stream: None changes nothing.
    """
    if stream is None:
        yield
        return
    here = torch.cuda.current_stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        yield
    here.wait_stream(stream)


class GraphedStepper(Stepper):
    """A Stepper whose `forward`, in place of the wrapped model, and `backward` capture a step and
    replay it.

    `forward` only fills in the batch and returns the tensor in which the loss will be; `backward`
    replays the whole step, so that the loop stays what it is. Needs a fused optimizer, whose
    learning rate may be a tensor, and one micro-batch per step.
    """

    def __init__(
        self,
        wrapped: Callable[[Any], tuple[Tensor, Tensor | None]],
        stream: torch.cuda.Stream,
        is_full: Callable[[int], bool],
        *arguments: Any,
        trial: CaptureTrial,
        **options: Any,
    ) -> None:
        """
        stream: the one on which `wrapped` was built.
        is_full: whether the global batch of a step is a whole one: all ranks must replay or none,
            as NCCL demands, whatever the shape of their own micro-batches.
        trial: decides after the warm-up whether steps are captured.
        arguments, options: those of Stepper.
        """
        self.wrapped = wrapped
        self.stream = stream
        self.is_full = is_full
        self.trial = trial
        self.captures = True
        self.warm_up_left = WARM_UP_STEPS
        self.graph: torch.cuda.CUDAGraph | None = None
        self.replayed = False
        super().__init__(*arguments, **options)
        for group in self.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True

    def continue_from(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            # A graph reads its learning rate where it was captured.
            group["lr"] = torch.zeros((), device=self.device)
        self.filled_with: dict[Tensor, float] = {}
        """The constants that the graph reads, and their last values."""
        super().continue_from(step)
        self.rates_set = self.rates_now()

    def set_values(self, step: int) -> None:
        self.values = self.schedule.values(step)
        for group, values in zip(self.optimizer.param_groups, self.values, strict=True):
            self._fill(group["lr"], values["lr"])
        self.rates_set = self.rates_now()

    def rates_now(self) -> list[Any]:
        """The tensor of each group's learning rate, and how often it was written; not its value,
        for which the host would wait."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [(id(rate), getattr(rate, "_version", None)) for rate in rates]

    def forward(self, data: Any) -> tuple[Tensor, Tensor | None]:
        """The loss of a batch, a scalar, and its number of units. In a captured step their values
        are there after `backward`.

        Raises LaunchError if a step cannot be captured, or would repeat what Python did in the
        capture, or if whole batches differ in shape. Out-of-memory errors are raised as they are.
        """
        is_full = self.is_full(self.steps_done)
        if is_full and self.graph is None and self.captures and not self.warm_up_left:
            self._capture_if_it_pays(data)
        if not is_full or self.graph is None:
            return self._by_kernels(data, is_full)
        batch = list(tensors(data))
        if [tensor.shape for tensor in batch] != self.shapes:
            raise LaunchError(
                "a batch has another shape than the batch with which the step was captured as a"
                " CUDA graph",
                "use tuning.cuda_graph=false",
            )
        for static, value in zip(self.batch, batch, strict=True):
            static.copy_(value)
        return self.loss, self.units

    def _by_kernels(self, data: Any, is_full: bool) -> tuple[Tensor, Tensor | None]:
        """A forward pass kernel by kernel; the last two of the warm-up are those of the trial."""
        watched: AbstractContextManager[None] = contextlib.nullcontext()
        if is_full and self.warm_up_left == 2:
            watched = self.trial.watched()
        elif is_full and self.warm_up_left == 1 and self.trial.if_it_pays:
            self.trial.begin()
        with watched, on_stream(self.stream):
            outputs = self.wrapped(data)
        if self.logged.pending and not self.trial.in_python:
            name = self.logged.pending[0].name
            self.trial.in_python = f"the forward pass logs {name!r}"
        return outputs

    def _backward(self, loss: Tensor, units: Tensor | None, micro_batch: MicroBatch) -> None:
        if self.graph is None or loss is not self.loss:
            with on_stream(self.stream):
                super()._backward(loss, units, micro_batch)
            return
        self._fill(self.scale, micro_batch.scale)
        self.follow_schedule()
        self.graph.replay()
        self.losses.add(loss.clone(), self.units_seen(units, micro_batch), micro_batch)
        self.replayed = True

    def _step(self) -> None:
        if self.replayed:
            self.replayed = False
            self.steps_done += 1
            return
        is_full = self.is_full(self.steps_done)
        self._step_by_kernels(is_full)

    def _step_by_kernels(self, is_full: bool) -> None:
        with on_stream(self.stream):
            super()._step()
        if not is_full or not self.warm_up_left:
            return
        if self.warm_up_left == 1 and self.trial.if_it_pays:
            self.trial.end()
        self.warm_up_left -= 1

    def rehearse(
        self,
        batch: Batch,
        module: nn.Module,
        sync_gradients: Callable[[MicroBatch], AbstractContextManager[Any]],
    ) -> None:
        """Warm up and capture before training begins, and undo what these steps did.

        To be called when all that the step looks at is built and loaded. What the optimizer
        remembers of a parameter begins with zeros; it has no average of the weights beside it.

        module: has all parameters and buffers.
        sync_gradients: see `Strategy`.

        Raises LaunchError if these steps changed what they cannot undo.
        """
        before = look_through(self.trial.roots)
        with self._undone(module):
            while self.warm_up_left:
                with sync_gradients(batch.micro_batch):
                    loss, units = self._by_kernels(batch.data, is_full=True)
                    super()._backward(loss, units, batch.micro_batch)
                self._step_by_kernels(is_full=True)
            self._capture_if_it_pays(batch.data)
            after = look_through(self.trial.roots)
            reason = self.trial.in_python or kept_in_python(before, after)
            if reason:
                raise LaunchError(
                    f"{reason}, which tuning.rehearse=true cannot undo",
                    "keep numbers in buffers and change these in place, draw random numbers on"
                    " the GPU, or use tuning.rehearse=false",
                )

    @contextlib.contextmanager
    def _undone(self, module: nn.Module) -> Iterator[None]:
        """A context after which every tensor holds what it held before, in its place: the graph
        refers to it."""
        changed = [*module.parameters(), *module.buffers(), *self._moments()]
        if isinstance(self.check_finite, DeviceNonFiniteCheck):
            changed += [self.check_finite.stopped, self.check_finite.steps_skipped]
        before = [tensor.detach().clone() for tensor in changed]
        scaler = self.scaler.state_dict()
        steps_done = self.steps_done
        yield
        with torch.no_grad():
            for moment in self._moments():  # those that began inside
                moment.zero_()
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
        self.scaler.load_state_dict(scaler)
        self.steps_done = steps_done
        self.norm = None
        self.losses.__init__()
        self.logged.pending.clear()

    def _moments(self) -> list[Tensor]:
        return list(tensors(list(self.optimizer.state.values())))

    def _capture_if_it_pays(self, data: Any) -> None:
        reason = self.trial.why_not()
        self.captures = not reason
        if reason:
            log.info("steps are not captured as a CUDA graph: %s", reason)
        else:
            self._capture_or_explain(data)

    def _capture_or_explain(self, data: Any) -> None:
        try:
            self._capture(data)
        except RuntimeError as error:
            for cause in (error, error.__context__):  # ending a capture that failed may fail too
                if cause and is_out_of_memory(cause):
                    raise cause from None
            reasons = first_line(error)
            if self.trial.waits:
                reasons = f"{self.trial.waits}; {reasons}"
            raise LaunchError(
                f"the training step cannot be captured as a CUDA graph: {reasons}",
                "use tuning.cuda_graph=false",
            ) from error

    def _capture(self, data: Any) -> None:
        """Capture a step for batches of this shape; none is taken."""
        static = map_tensors(torch.clone, data)
        self.batch = list(tensors(static))
        self.shapes = [tensor.shape for tensor in self.batch]
        self.scale = torch.zeros((), device=self.device)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Only this thread's calls are checked: NCCL's watchdog and pin_memory make some that a
        # capture forbids.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            loss, units = self.wrapped(static)
            self.count(units, self.scale, is_last=True)
            start = self.start(loss.detach(), self.scale)
            torch.autograd.backward((loss,), (self.scaler.scale(start) if self.scaled else start,))
            self.update()
        self.loss = loss.detach()
        self.units = units
        self.graph = graph

    def close(self) -> None:
        """Let go of the graph: NCCL cannot close a communicator while a graph that captured its
        collectives exists (`commDestroySync` in its init.cc)."""
        if self.graph is not None:
            self.graph.reset()
        self.graph = None
        self.captures = False

    def _fill(self, constant: Tensor, value: float) -> None:
        if self.filled_with.get(constant) != value:
            self.filled_with[constant] = value
            constant.fill_(value)
