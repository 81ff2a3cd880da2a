"""cuDNN's convolutions that add up their outputs and the squares of these ("genstats"), and what
they save.

Kernels are chosen by timing, as `tuning.cudnn_benchmark` does: some tenths of a second for each
shape.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ddp_train.text import first_line

log = logging.getLogger(__name__)
MOST_PLANS = 12
"""Kernels that are tried for each shape."""
TIMED_RUNS = 5
SLEEP_CYCLES = 2_000_000
"""A millisecond in which the host gets ahead: events around a kernel that is shorter than its
launch measure that."""
MARGIN = 0.97
"""Part of torch's time that cuDNN may take, so that not every tie is decided for it."""

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""A function of x, weight, y and sums, which fills in the last two."""


class Case(NamedTuple):
    """A convolution, as cuDNN sees it."""

    device: torch.device
    dtype: torch.dtype
    x_shape: torch.Size
    weight_shape: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def window(self) -> tuple[list[int], list[int], list[int]]:
        return list(self.stride), list(self.padding), list(self.dilation)

    def zeros(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, weight, y and sums."""
        x, weight = (
            torch.zeros(shape, dtype=self.dtype, device=self.device).contiguous(
                memory_format=torch.channels_last
            )
            for shape in (self.x_shape, self.weight_shape)
        )
        return x, weight, *empty_outputs(x, weight, *self.window)


def empty_outputs(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> tuple[Tensor, Tensor]:
    """y, [n, k, oh, ow], channels_last, and sums, [2, k], float32."""
    height, width = (
        (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, spread in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    )
    shape = (len(x), len(weight), height, width)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    return y, torch.empty((2, len(weight)), device=x.device)


@cache
def milliseconds_saved(case: Case) -> float:
    """Milliseconds that a sum in the convolution saves, beside torch's convolution and a pass over
    its output."""
    kernel = fastest_kernel(case)
    if not kernel:
        return 0.0
    x, weight, y, sums = case.zeros()
    with torch.cuda.device_of(x):
        convolution = median_milliseconds(partial(functional.conv2d, x, weight, None, *case.window))
        copy = median_milliseconds(y.clone)  # a pass reads, and a copy reads and writes
        # Timed once more: the fastest of several is in part the luckiest.
        by_cudnn = median_milliseconds(partial(kernel, x, weight, y, sums))
    return MARGIN * (convolution + copy / 2) - by_cudnn


@cache
def fastest_kernel(case: Case) -> Kernel | None:
    """The fastest of cuDNN's plans, timed on zeros. None: it has none, and the log says why."""
    tensors = case.zeros()
    graph = GenstatsGraph(case)
    timings: list[tuple[float, int]] = []
    reason = graph.reason_unsupported()
    if not reason:
        reason = "no plan"
        for plan in range(min(MOST_PLANS, graph.graph.get_execution_plan_count())):
            try:
                graph.graph.build_plan_at_index(plan)
            except RuntimeError as error:  # this plan alone
                reason = first_line(error)
            else:
                milliseconds = median_milliseconds(partial(graph.run, plan, *tensors))
                timings.append((milliseconds, plan))
    if timings:
        return partial(graph.run, min(timings)[1])
    log.info("tuning.conv_sums: cuDNN has no kernel for %s (%s)", case, reason)
    return None


class GenstatsGraph:
    """cuDNN's graph of a convolution and the sums of its outputs."""

    def __init__(self, case: Case) -> None:
        import cudnn  # pyright: ignore[reportMissingImports]

        half_types = {
            torch.float16: cudnn.data_type.HALF,
            torch.bfloat16: cudnn.data_type.BFLOAT16,
        }
        half = half_types[case.dtype]
        full = cudnn.data_type.FLOAT
        stride, padding, dilation = case.window
        x, weight, y, _ = case.zeros()
        self.cudnn = cudnn
        self.device = case.device
        self.handle = _handle(case.device)
        self.graph = cudnn.pygraph(
            io_data_type=half,
            intermediate_data_type=full,
            compute_data_type=full,
            handle=self.handle,
        )
        self.x, self.weight = (
            self.graph.tensor(
                name=name, dim=list(tensor.shape), stride=list(tensor.stride()), data_type=half
            )
            for name, tensor in (("x", x), ("weight", weight))
        )
        self.y = self.graph.conv_fprop(
            image=self.x, weight=self.weight, padding=padding, stride=stride, dilation=dilation
        )
        self.y.set_output(True).set_data_type(half)
        self.y.set_dim(list(y.shape)).set_stride(list(y.stride()))
        self.sums = self.graph.genstats(name="genstats", input=self.y)
        for tensor in self.sums:
            tensor.set_output(True).set_data_type(full)

    def reason_unsupported(self) -> str:
        """Why cuDNN cannot run it; "" if it can. A text: an error would keep its frames, and their
        tensors."""
        modes = self.cudnn.heur_mode
        try:
            self.graph.validate()
            self.graph.build_operation_graph()
            self.graph.create_execution_plans([modes.A, modes.B, modes.FALLBACK])
            self.graph.check_support()
        except RuntimeError as error:  # cudnn.cudnnGraphNotSupportedError among them
            return first_line(error)
        return ""

    def run(self, plan: int, x: Tensor, weight: Tensor, y: Tensor, sums: Tensor) -> None:
        size = max(1, self.graph.get_workspace_size_plan_at_index(plan))
        workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self.cudnn.set_stream(handle=self.handle, stream=stream)
        total, squares = self.sums
        tensors = {self.x: x, self.weight: weight, self.y: y, total: sums[0], squares: sums[1]}
        self.graph.execute_plan_at_index(tensors, workspace, plan, handle=self.handle)


@cache
def _handle(device: torch.device) -> Any:
    import cudnn  # pyright: ignore[reportMissingImports]

    return cudnn.create_handle()


def median_milliseconds(work: Callable[[], object]) -> float:
    work()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(TIMED_RUNS)]
    torch.cuda._sleep(SLEEP_CYCLES)
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)
