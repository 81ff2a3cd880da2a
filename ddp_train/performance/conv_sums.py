"""Batch norm whose sums the convolution before it computes while it writes its output.

A batch norm reads its input twice: for mean and variance, and to normalise it (Jung et al., arXiv:1807.01702). cuDNN's
graph API adds up outputs and their squares in the epilogue of a convolution ("genstats"), so that one of the two is not
needed. For the 52 convolutions of ResNet-50 that it can do so, 1,024 pictures in fp16 on an H200, the first pass takes
more than 7 ms, and these convolutions 0.6 ms more than torch's (docs/benchmarks/speed.md). The variance is mean(y^2) -
mean(y)^2 in float32: its relative error is 1e-7 times 1 + mean^2 / variance.

`ConvSums` rewrites the graph of a compiled model before it is differentiated.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.proxy import GraphAppendingTracer, Proxy
from torch.nn import functional

log = logging.getLogger(__name__)
DTYPES = (torch.float16, torch.bfloat16)
CHANNELS = 8
"""cuDNN's kernels want a multiple of it, before and after."""
MOST_PLANS, TIMED_RUNS = 12, 5
"""What is tried for each shape, as `tuning.cudnn_benchmark` does: some tenths of a second."""


# --- the pass ---------------------------------------------------------------------------------------------------------


class ConvSums(CustomGraphPass):
    """For torch.compile(options={"pre_grad_custom_pass": ConvSums()})."""

    def __init__(self, device: str = "cuda", dtypes: Sequence[torch.dtype] = DTYPES) -> None:
        self.device, self.dtypes = device, dtypes

    def __call__(self, graph: fx.Graph) -> None:
        tracer = GraphAppendingTracer(graph)
        for norm in list(graph.nodes):
            found = self._arguments(norm)
            if found:
                conv, tensors, constants = found
                with graph.inserting_before(conv):  # proxies append to the graph what is done with them
                    proxies: list[Any] = [Proxy(node, tracer) for node in tensors]
                    made: Any = conv_batch_norm(*proxies, **constants)
                    normalised, y = (one.node for one in made)
                norm.replace_all_uses_with(normalised)
                graph.erase_node(norm)
                conv.replace_all_uses_with(y)
                graph.erase_node(conv)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,)), self.device, tuple(map(str, self.dtypes))

    def _arguments(self, norm: fx.Node) -> tuple[fx.Node, list[Any], dict[str, Any]] | None:
        """Of a batch norm in training behind a convolution that cuDNN can sum up: what `conv_batch_norm` takes."""
        if norm.target is not functional.batch_norm:
            return None
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = dict(zip(names, norm.args, strict=False)) | norm.kwargs
        conv = given["input"]
        wanted = [given.get(name) for name in names[1:5]]
        known = given.get("training") is True and isinstance(given.get("momentum"), float)
        if not known or not isinstance(conv, fx.Node) or conv.target not in (torch.conv2d, functional.conv2d):
            return None
        if not all(isinstance(one, fx.Node) for one in wanted):
            return None
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        of_conv: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        of_conv |= dict(zip(names, conv.args, strict=False)) | conv.kwargs
        y, weight = (node.meta.get("example_value") for node in (conv, of_conv["weight"]))
        if not isinstance(y, Tensor) or not isinstance(weight, Tensor):
            return None
        fits = (
            (y.device.type == self.device and y.dtype in self.dtypes and y.ndim == 4)
            and (of_conv["bias"] is None and of_conv["groups"] == 1 and not isinstance(of_conv["padding"], str))
            and all(isinstance(size, int) and size % CHANNELS == 0 for size in weight.shape[:2])
            and all(isinstance(size, int) for size in y.shape)
            and y.numel() > y.shape[1]  # torch's own says that one value for each channel has no variance
        )
        if not fits:
            return None
        constants = {name: _pair(of_conv[name]) for name in ("stride", "padding", "dilation")}
        constants |= {"count": y.numel() // y.shape[1], "dtype": y.dtype}
        constants |= {"momentum": given["momentum"], "eps": given["eps"]}
        return conv, [of_conv["input"], of_conv["weight"], *wanted], constants


def _pair(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def conv_batch_norm(
    x: Tensor,
    weight: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    gamma: Tensor,
    beta: Tensor,
    *,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    count: int,
    dtype: torch.dtype,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The normalised output of a convolution and the output itself, [n, k, oh, ow]; updates the running averages.

    count: n * oh * ow. dtype: that of autocast.
    """
    made = torch.ops.ddp_train.conv_sums(x.to(dtype), weight.to(dtype), stride, padding, dilation)
    y, sums = made[0], made[1]
    mean = sums[0] / count
    variance = (sums[1] / count - mean * mean).clamp(min=0)
    running_mean.mul_(1 - momentum).add_(mean.detach(), alpha=momentum)
    running_var.mul_(1 - momentum).add_(variance.detach(), alpha=momentum * count / max(1, count - 1))
    scale = torch.rsqrt(variance + eps) * gamma
    whole = (y.float() - mean.view(1, -1, 1, 1)) * scale.view(1, -1, 1, 1) + beta.view(1, -1, 1, 1)
    return whole.to(dtype), y


# --- the operator -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("ddp_train::conv_sums", mutates_args=())
def conv_sums(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> tuple[Tensor, Tensor]:
    """[n, c, h, w] and [k, c, r, s] -> the convolution, [n, k, oh, ow], channels_last, and the sums of its outputs and
    of their squares, [2, k], float32. Where cuDNN has no kernel for it, in two passes."""
    x, weight = (one.contiguous(memory_format=torch.channels_last) for one in (x, weight))
    if x.is_cuda:
        with torch.cuda.device_of(x):
            run = _kernel(x.device, x.dtype, x.shape, weight.shape, *map(tuple, (stride, padding, dilation)))
            if run is not None:
                y, sums = _empty(x, weight, stride, padding, dilation)
                run(x, weight, y, sums)
                return y, sums
    y = functional.conv2d(x, weight, None, stride, padding, dilation).contiguous(memory_format=torch.channels_last)
    outputs = y.float()
    return y, torch.stack([outputs.sum((0, 2, 3)), outputs.square().sum((0, 2, 3))])


@conv_sums.register_fake
def _empty(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> tuple[Tensor, Tensor]:
    n, k = len(x), len(weight)
    height, width = (
        (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, spread in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    )
    y = torch.empty((n, k, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    return y, torch.empty((2, k), device=x.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, *ctx.window = inputs
    ctx.save_for_backward(x, weight, output[0])


def _gradient(ctx: Any, dy: Tensor, dsums: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    x, weight, y = ctx.saved_tensors
    of_sum, of_squares = (one.view(1, -1, 1, 1) for one in dsums)
    whole = (dy.float() + of_sum + 2 * of_squares * y.float()).to(y.dtype)
    needed = [*ctx.needs_input_grad[:2], False]
    dx, dweight, _ = torch.ops.aten.convolution_backward(whole, x, weight, None, *ctx.window, False, [0, 0], 1, needed)
    return dx, dweight, None, None, None


conv_sums.register_autograd(_gradient, setup_context=_keep)


# --- cuDNN ------------------------------------------------------------------------------------------------------------


@cache
def _handle(device: torch.device) -> Any:
    import cudnn  # pyright: ignore[reportMissingImports]

    return cudnn.create_handle()


@cache
def _kernel(
    device: torch.device,
    dtype: torch.dtype,
    x_shape: torch.Size,
    weight_shape: torch.Size,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Callable[[Tensor, Tensor, Tensor, Tensor], None] | None:
    """The fastest of cuDNN's plans for a shape, timed on zeros; takes x, weight, y and sums. None: it has none."""
    import cudnn  # pyright: ignore[reportMissingImports]

    handle = _handle(device)
    x, weight = (
        torch.zeros(shape, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
        for shape in (x_shape, weight_shape)
    )
    y, sums = _empty(x, weight, list(stride), list(padding), list(dilation))
    half = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}[dtype]
    full = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=half, intermediate_data_type=full, compute_data_type=full, handle=handle)

    def given(tensor: Tensor, name: str) -> Any:
        return graph.tensor(name=name, dim=list(tensor.shape), stride=list(tensor.stride()), data_type=half)

    image, filters = given(x, "x"), given(weight, "weight")
    output = graph.conv_fprop(
        image=image, weight=filters, padding=list(padding), stride=list(stride), dilation=list(dilation)
    )
    output.set_output(True).set_data_type(half).set_dim(list(y.shape)).set_stride(list(y.stride()))
    total, squares = graph.genstats(name="genstats", input=output)
    for one in (total, squares):
        one.set_output(True).set_data_type(full)

    def run(index: int, x: Tensor, weight: Tensor, y: Tensor, sums: Tensor) -> None:
        workspace = torch.empty(max(1, graph.get_workspace_size_plan_at_index(index)), dtype=torch.uint8, device=device)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        tensors = {image: x, filters: weight, output: y, total: sums[0], squares: sums[1]}
        graph.execute_plan_at_index(tensors, workspace, index, handle=handle)

    timed: list[tuple[float, int]] = []
    reason: Exception | None = None
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK])
        graph.check_support()
    except RuntimeError as error:  # cudnn.cudnnGraphNotSupportedError among them
        reason = error
    else:
        for index in range(min(MOST_PLANS, graph.get_execution_plan_count())):
            try:
                graph.build_plan_at_index(index)
                timed.append((_milliseconds(partial(run, index, x, weight, y, sums)), index))
            except RuntimeError as error:  # this plan alone
                reason = error
    if not timed:
        shapes = f"{list(x_shape)} by {list(weight_shape)}, stride {list(stride)}, {dtype}"
        log.warning(
            "tuning.conv_sums: cuDNN has no kernel for %s, which torch computes in two passes (%s)", shapes, reason
        )
        return None
    return partial(run, min(timed)[1])


def _milliseconds(work: Callable[[], None]) -> float:
    work()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(TIMED_RUNS)]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)
