"""Batch norm whose sums the convolution before it computes while it writes its output.

A batch norm reads its input twice: for mean and variance, and to normalise it (Jung et al.,
arXiv:1807.01702). cuDNN's graph API adds up outputs and their squares in the epilogue of a
convolution ("genstats"), so that one of the two is not needed. For the 52 convolutions of ResNet-50
that it can do so, 1,024 pictures in fp16 on an H200, the first pass takes more than 7 ms, and these
convolutions 0.6 ms more than torch's (docs/benchmarks/speed.md). The variance is mean(y^2) -
mean(y)^2 in float32: its relative error is some 1e-7 times 1 + mean^2 / variance.

`ConvSums` rewrites the graph of a compiled model before it is differentiated, for the convolutions
for which that is faster by their own timing.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import decompositions, fast_random_decomps
from torch.fx.proxy import GraphAppendingTracer, Proxy
from torch.nn import functional

from ddp_train.text import counted, first_line

log = logging.getLogger(__name__)
DTYPES = (torch.float16, torch.bfloat16)
CHANNELS = 8
"""cuDNN's kernels want a multiple of it, before and after."""
OF_CONV = {
    "input": None,
    "weight": None,
    "bias": None,
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
}
OF_NORM = {
    "input": None,
    "running_mean": None,
    "running_var": None,
    "weight": None,
    "bias": None,
    "training": False,
    "momentum": 0.1,
    "eps": 1e-5,
}
"""Arguments of torch's functions, in their order, with their defaults."""
TENSORS_OF_NORM = ("running_mean", "running_var", "weight", "bias")
MOST_PLANS = 12
TIMED_RUNS = 5
"""What is tried for each shape, as `tuning.cudnn_benchmark` does: some tenths of a second."""
SLEEP_CYCLES = 2_000_000
"""A millisecond in which the host gets ahead: events around a kernel that is shorter than its
launch measure that."""
MARGIN = 0.97
"""Part of torch's time that cuDNN may take, so that not every tie is decided for it."""


# --- the pass -------------------------------------------------------------------------------------


class ConvSums(CustomGraphPass):
    """For torch.compile(options={"pre_grad_custom_pass": ConvSums()})."""

    def __init__(
        self, device: str = "cuda", dtypes: Sequence[torch.dtype] = DTYPES, always: bool = False
    ) -> None:
        """always: also where it saves no time, as on a CPU."""
        self.device = device
        self.dtypes = dtypes
        self.always = always

    def __call__(self, graph: fx.Graph) -> None:
        savings: list[float] = []
        order = {node: place for place, node in enumerate(graph.nodes)}
        tracer = GraphAppendingTracer(graph)  # what is done with a proxy is appended to the graph
        for norm in list(graph.nodes):
            of_norm = _arguments(norm, (functional.batch_norm,), OF_NORM)
            conv: Any = of_norm["input"] if of_norm else None
            of_conv = _arguments(conv, (torch.conv2d, functional.conv2d), OF_CONV)
            # Who sees the output before the batch norm does may change it in place.
            if (
                not of_norm
                or not of_conv
                or any(order.get(user, -1) < order[norm] for user in conv.users)
            ):
                continue
            if not self._fit(conv.meta.get("example_value"), of_conv, of_norm):
                continue
            if not self.always:
                savings.append(milliseconds_saved(_case(conv.meta["example_value"], of_conv)))
                if savings[-1] <= 0:
                    continue
            dtype = conv.meta["example_value"].dtype
            shape = conv.meta["example_value"].shape
            with graph.inserting_before(conv):
                operands = (Proxy(of_conv[name], tracer).to(dtype) for name in ("input", "weight"))
                window = (_pair(of_conv[name]) for name in ("stride", "padding", "dilation"))
                made: Any = torch.ops.ddp_train.conv_sums(*operands, *window)
                y = made[0]
                sums = made[1]
            with graph.inserting_before(norm):
                tensors: dict[str, Any] = {
                    name: Proxy(of_norm[name], tracer) for name in TENSORS_OF_NORM
                }
                numbers = {
                    "count": shape.numel() // shape[1],
                    "momentum": of_norm["momentum"],
                    "eps": of_norm["eps"],
                }
                of_sums: Any = batch_norm(y, sums, **tensors, **numbers)
            norm.replace_all_uses_with(of_sums.node)
            graph.erase_node(norm)
            conv.replace_all_uses_with(y.node)
            graph.erase_node(conv)
        if savings:
            paying = [one for one in savings if one > 0]
            by_cudnn = f"cuDNN sums up {len(paying)} of {counted(len(savings), 'convolution')}"
            log.info(
                "tuning.conv_sums: %s, which saves %.2f ms by their timing", by_cudnn, sum(paying)
            )

    def uuid(self) -> Any:
        return (
            get_hash_for_files((__file__,)),
            self.device,
            tuple(map(str, self.dtypes)),
            self.always,
        )

    def _fit(self, y: Any, of_conv: dict[str, Any], of_norm: dict[str, Any]) -> bool:
        """Whether cuDNN can sum up the outputs y, and the batch norm is one in training, with all
        its tensors."""
        weight = of_conv["weight"].meta.get("example_value")
        return (
            (isinstance(y, Tensor) and isinstance(weight, Tensor))
            and (y.device.type == self.device and y.dtype in self.dtypes and y.ndim == 4)
            and all(isinstance(size, int) for size in (*y.shape, *weight.shape))
            and y.numel()
            > y.shape[1]  # torch's own says that one value for each channel has no variance
            and all(size % CHANNELS == 0 for size in weight.shape[:2])
            and (
                of_conv["bias"] is None
                and of_conv["groups"] == 1
                and not isinstance(of_conv["padding"], str)
            )
            and of_norm["training"] is True
            and isinstance(of_norm["momentum"], float)
            and all(isinstance(of_norm[name], fx.Node) for name in TENSORS_OF_NORM)
            # We change the averages in place: others may have kept them for a gradient, a layer
            # that is used twice too.
            and of_norm["running_mean"] is not of_norm["running_var"]
            and all(len(of_norm[name].users) == 1 for name in ("running_mean", "running_var"))
        )


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


def _case(y: Tensor, of_conv: dict[str, Any]) -> Case:
    shapes = (of_conv[name].meta["example_value"].shape for name in ("input", "weight"))
    window = (tuple(_pair(of_conv[name])) for name in ("stride", "padding", "dilation"))
    return Case(y.device, y.dtype, *shapes, *window)


def _arguments(
    node: Any, functions: tuple[Any, ...], defaults: dict[str, Any]
) -> dict[str, Any] | None:
    """All of them by name, if it is a call of one of these functions."""
    if not isinstance(node, fx.Node) or node.target not in functions:
        return None
    return defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs


def _pair(value: int | Sequence[int]) -> list[int]:
    if isinstance(value, int):
        return [value, value]
    return list(value) * (2 // len(value))


def batch_norm(
    y: Tensor,
    sums: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor,
    bias: Tensor,
    count: int,
    momentum: float,
    eps: float,
) -> Tensor:
    """As torch.nn.functional.batch_norm in training, of y, [n, k, oh, ow], whose sums, [2, k], over
    `count` = n * oh * ow outputs are known. Updates the running averages."""
    mean, variance = _moments(sums, count)
    running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
    running_var.mul_(1 - momentum).add_(variance, alpha=momentum * count / (count - 1))
    return torch.ops.ddp_train.normalised(y, sums, weight, bias, count, eps)[0]


def _moments(sums: Tensor, count: int) -> tuple[Tensor, Tensor]:
    mean = sums[0] / count
    return mean, (sums[1] / count - mean * mean).clamp(min=0)


# --- the operators --------------------------------------------------------------------------------


@torch.library.custom_op("ddp_train::conv_sums", mutates_args=())
def conv_sums(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> tuple[Tensor, Tensor]:
    """[n, c, h, w] and [k, c, r, s] -> the convolution, [n, k, oh, ow], channels_last, and the sums
    of its outputs and of their squares, [2, k], float32. Where cuDNN has no kernel for it, in three
    passes."""
    x, weight = (one.contiguous(memory_format=torch.channels_last) for one in (x, weight))
    if x.is_cuda:
        with torch.cuda.device_of(x):
            run = fastest_kernel(
                Case(
                    x.device,
                    x.dtype,
                    x.shape,
                    weight.shape,
                    *map(tuple, (stride, padding, dilation)),
                )
            )
            if run:
                y, sums = empty_outputs(x, weight, stride, padding, dilation)
                run(x, weight, y, sums)
                return y, sums
    y = functional.conv2d(x, weight, None, stride, padding, dilation).contiguous(
        memory_format=torch.channels_last
    )
    norms = torch.linalg.vector_norm(
        y, dim=(0, 2, 3), dtype=torch.float32
    )  # makes no copy of y in 32 bits
    return y, torch.stack([y.sum((0, 2, 3), dtype=torch.float32), norms.square()])


@conv_sums.register_fake
def empty_outputs(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> tuple[Tensor, Tensor]:
    n = len(x)
    k = len(weight)
    height, width = (
        (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, spread in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    )
    y = torch.empty(
        (n, k, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last
    )
    return y, torch.empty((2, k), device=x.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, *ctx.window = inputs
    ctx.save_for_backward(x, weight)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    needed = [*ctx.needs_input_grad[:2], False]
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        dy, *ctx.saved_tensors, None, *ctx.window, False, [0, 0], 1, needed
    )
    return dx, dweight, None, None, None


conv_sums.register_autograd(_gradient, setup_context=_keep)


def _normalised(
    y: Tensor, sums: Tensor, weight: Tensor, bias: Tensor, count: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, variance = _moments(sums, count)
    inverse = torch.rsqrt(variance + eps)
    shift, scale, start = (one.view(1, -1, 1, 1) for one in (mean, inverse * weight, bias))
    return ((y.float() - shift) * scale + start).to(y.dtype), mean, inverse


@torch.library.custom_op("ddp_train::normalised", mutates_args=())
def normalised(
    y: Tensor, sums: Tensor, weight: Tensor, bias: Tensor, count: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A batch norm of y, [n, k, oh, ow], whose sums, [2, k], are known: in y's type, with mean and
    inverse standard deviation, [k], float32. Its gradient is that of torch's own, in which the sums
    depend on y."""
    return _normalised(y, sums, weight, bias, count, eps)


def _keep_moments(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    y, _, weight, *_, ctx.eps = inputs
    ctx.save_for_backward(y, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradient_of_norm(ctx: Any, dz: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dz is None:
        return (None,) * 6
    y, weight, mean, inverse = ctx.saved_tensors
    needed = [ctx.needs_input_grad[place] for place in (0, 2, 3)]
    dy, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
        dz, y, weight, None, None, mean, inverse, True, ctx.eps, needed
    )
    return dy, None, dweight, dbias, None, None


normalised.register_fake(_normalised)
normalised.register_autograd(_gradient_of_norm, setup_context=_keep_moments)
decompositions[torch.ops.ddp_train.normalised.default] = (
    _normalised  # so that what follows is fused with it
)
fast_random_decomps.cache_clear()  # a copy, if something was compiled before


# --- cuDNN ----------------------------------------------------------------------------------------


@cache
def _handle(device: torch.device) -> Any:
    import cudnn  # pyright: ignore[reportMissingImports]

    return cudnn.create_handle()


Run = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Takes x, weight, y and sums."""


@cache
def milliseconds_saved(case: Case) -> float:
    """Milliseconds that a sum in the convolution saves, beside torch's convolution and a pass over
    its output."""
    run = fastest_kernel(case)
    if not run:
        return 0.0
    x, weight, y, sums = _zeros(case)
    with torch.cuda.device_of(x):
        convolution = median_milliseconds(partial(functional.conv2d, x, weight, None, *case.window))
        copy = median_milliseconds(y.clone)  # a pass reads, and a copy reads and writes
        # Timed once more: the fastest of several is in part the luckiest.
        return MARGIN * (convolution + copy / 2) - median_milliseconds(
            partial(run, x, weight, y, sums)
        )


def _zeros(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, y and sums."""
    x, weight = (
        torch.zeros(shape, dtype=case.dtype, device=case.device).contiguous(
            memory_format=torch.channels_last
        )
        for shape in (case.x_shape, case.weight_shape)
    )
    return x, weight, *empty_outputs(x, weight, *case.window)


@cache
def fastest_kernel(case: Case) -> Run | None:
    """The fastest of cuDNN's plans, timed on zeros. None: it has none, and the log says why."""
    import cudnn  # pyright: ignore[reportMissingImports]

    device, handle, (stride, padding, dilation) = case.device, _handle(case.device), case.window
    x, weight, y, sums = _zeros(case)
    half = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}[
        case.dtype
    ]
    full = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=half, intermediate_data_type=full, compute_data_type=full, handle=handle
    )

    def given(tensor: Tensor, name: str) -> Any:
        return graph.tensor(
            name=name, dim=list(tensor.shape), stride=list(tensor.stride()), data_type=half
        )

    image = given(x, "x")
    filters = given(weight, "weight")
    output = graph.conv_fprop(
        image=image, weight=filters, padding=padding, stride=stride, dilation=dilation
    )
    output.set_output(True).set_data_type(half).set_dim(list(y.shape)).set_stride(list(y.stride()))
    total, squares = graph.genstats(name="genstats", input=output)
    for one in (total, squares):
        one.set_output(True).set_data_type(full)

    def run(index: int, x: Tensor, weight: Tensor, y: Tensor, sums: Tensor) -> None:
        workspace = torch.empty(
            max(1, graph.get_workspace_size_plan_at_index(index)), dtype=torch.uint8, device=device
        )
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        tensors = {image: x, filters: weight, output: y, total: sums[0], squares: sums[1]}
        graph.execute_plan_at_index(tensors, workspace, index, handle=handle)

    timed: list[tuple[float, int]] = []
    reason = "no plan"  # a text: an exception would keep this frame, and its tensors
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans(
            [cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK]
        )
        graph.check_support()
        plans = min(MOST_PLANS, graph.get_execution_plan_count())
    except RuntimeError as error:  # cudnn.cudnnGraphNotSupportedError among them
        plans = 0
        reason = first_line(error)
    for index in range(plans):
        try:
            graph.build_plan_at_index(index)
        except RuntimeError as error:  # this plan alone
            reason = first_line(error)
        else:
            timed.append((median_milliseconds(partial(run, index, x, weight, y, sums)), index))
    if timed:
        return partial(run, min(timed)[1])
    log.info("tuning.conv_sums: cuDNN has no kernel for %s (%s)", case, reason)
    return None


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
