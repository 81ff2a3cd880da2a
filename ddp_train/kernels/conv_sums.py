"""Batch norm whose sums the convolution before it computes while it writes its output.

A batch norm reads its input twice: for mean and variance, and to normalise it (Jung et al.,
arXiv:1807.01702). cuDNN's graph API adds up outputs and their squares in the epilogue of a
convolution ("genstats"), so that one of the two is not needed. For the 52 convolutions of ResNet-50
that it can do so, 1,024 pictures in fp16 on an H200, the first pass takes more than 7 ms, and these
convolutions 0.6 ms more than torch's (docs/inside/benchmarks/conv_sums.md).

`ConvSums` rewrites the graph of a compiled model before it is differentiated, for the convolutions
for which that is faster by their own timing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.proxy import GraphAppendingTracer, Proxy
from torch.nn import functional

from ddp_train.kernels import conv_sums_operators, genstats
from ddp_train.kernels.conv_sums_operators import BatchNorm
from ddp_train.kernels.genstats import Case, milliseconds_saved
from ddp_train.text import counted

log = logging.getLogger(__name__)
DTYPES = (torch.float16, torch.bfloat16)
CHANNELS = 8
"""cuDNN's kernels want a multiple of it, before and after."""
CONV_DEFAULTS = {
    "input": None,
    "weight": None,
    "bias": None,
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
}
"""Arguments of torch's function, in their order."""
NORM_DEFAULTS = {
    "input": None,
    "running_mean": None,
    "running_var": None,
    "weight": None,
    "bias": None,
    "training": False,
    "momentum": 0.1,
    "eps": 1e-5,
}
NORM_TENSORS = ("running_mean", "running_var", "weight", "bias")


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
        for pair in pairs_of(graph):
            if not pair.fits(self.device, self.dtypes):
                continue
            if not self.always:
                saving = milliseconds_saved(pair.case)
                savings.append(saving)
                if saving <= 0:
                    continue
            pair.replace(graph)
        if savings:
            paying = [saving for saving in savings if saving > 0]
            by_cudnn = f"cuDNN sums up {len(paying)} of {counted(len(savings), 'convolution')}"
            log.info(
                "tuning.conv_sums: %s, which saves %.2f ms by their timing", by_cudnn, sum(paying)
            )

    def uuid(self) -> Any:
        files = (__file__, conv_sums_operators.__file__, genstats.__file__)
        dtypes = tuple(map(str, self.dtypes))
        return (get_hash_for_files(files), self.device, dtypes, self.always)


@dataclass(frozen=True)
class Pair:
    """A convolution in a graph, and the batch norm of its output."""

    conv: fx.Node
    norm: fx.Node
    of_conv: dict[str, Any]
    """The arguments of the convolution, by name."""
    of_norm: dict[str, Any]

    def fits(self, device: str, dtypes: Sequence[torch.dtype]) -> bool:
        """Whether cuDNN can sum up the outputs, and the batch norm is one in training, with all its
        tensors."""
        y = self.conv.meta.get("example_value")
        weight = self.of_conv["weight"].meta.get("example_value")
        if not (isinstance(y, Tensor) and isinstance(weight, Tensor)):
            return False
        shapes_are_known = all(isinstance(size, int) for size in (*y.shape, *weight.shape))
        return (
            y.device.type == device
            and y.dtype in dtypes
            and y.ndim == 4
            and shapes_are_known
            # torch's own says that one value for each channel has no variance.
            and y.numel() > y.shape[1]
            and all(size % CHANNELS == 0 for size in weight.shape[:2])
            and self._conv_is_plain()
            and self._norm_trains()
        )

    def _conv_is_plain(self) -> bool:
        has_bias = self.of_conv["bias"] is not None
        pads_by_name = isinstance(self.of_conv["padding"], str)
        return not has_bias and not pads_by_name and self.of_conv["groups"] == 1

    def _norm_trains(self) -> bool:
        of_norm = self.of_norm
        averages = (of_norm["running_mean"], of_norm["running_var"])
        return (
            of_norm["training"] is True
            and isinstance(of_norm["momentum"], float)
            and all(isinstance(of_norm[name], fx.Node) for name in NORM_TENSORS)
            # We change the averages in place: others may have kept them for a gradient, a layer
            # that is used twice too.
            and averages[0] is not averages[1]
            and all(len(average.users) == 1 for average in averages)
        )

    @property
    def window(self) -> list[list[int]]:
        """Stride, padding and dilation."""
        return [_pair(self.of_conv[name]) for name in ("stride", "padding", "dilation")]

    @property
    def case(self) -> Case:
        y = self.conv.meta["example_value"]
        x, weight = (self.of_conv[name].meta["example_value"] for name in ("input", "weight"))
        return Case(y.device, y.dtype, x.shape, weight.shape, *map(tuple, self.window))

    def replace(self, graph: fx.Graph) -> None:
        """Put the operators that use the sums in their place."""
        tracer = GraphAppendingTracer(graph)  # what is done with a proxy is appended to the graph
        outputs = self.conv.meta["example_value"]
        with graph.inserting_before(self.conv):
            x, weight = (
                Proxy(self.of_conv[name], tracer).to(outputs.dtype) for name in ("input", "weight")
            )
            y_and_sums: Any = torch.ops.ddp_train.conv_sums(x, weight, *self.window)
            y = y_and_sums[0]
            sums = y_and_sums[1]
        with graph.inserting_before(self.norm):
            tensors: dict[str, Any] = {
                name: Proxy(self.of_norm[name], tracer) for name in NORM_TENSORS
            }
            norm = BatchNorm(**tensors, momentum=self.of_norm["momentum"], eps=self.of_norm["eps"])
            count = outputs.numel() // outputs.shape[1]
            z: Any = norm.normalise(y, sums, count)
        for old, new in ((self.norm, z.node), (self.conv, y.node)):
            new.meta.update(old.meta)  # the next convolution asks for the shape of its input
            old.replace_all_uses_with(new)
            graph.erase_node(old)


def pairs_of(graph: fx.Graph) -> Iterator[Pair]:
    """The batch norms behind convolutions, whose outputs nothing else sees before. A pair may be
    replaced before the next one is asked for."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for norm in list(graph.nodes):
        of_norm = _arguments(norm, (functional.batch_norm,), NORM_DEFAULTS)
        if not of_norm:
            continue
        conv = of_norm["input"]
        of_conv = _arguments(conv, (torch.conv2d, functional.conv2d), CONV_DEFAULTS)
        # Who sees the output before the batch norm does may change it in place.
        if of_conv and all(order.get(user, -1) >= order[norm] for user in conv.users):
            yield Pair(conv, norm, of_conv, of_norm)


def _arguments(
    node: Any, functions: tuple[Any, ...], defaults: dict[str, Any]
) -> dict[str, Any] | None:
    """All arguments by name, if the node is a call of one of these functions."""
    if not isinstance(node, fx.Node) or node.target not in functions:
        return None
    return defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs


def _pair(value: int | Sequence[int]) -> list[int]:
    if isinstance(value, int):
        return [value, value]
    return list(value) * (2 // len(value))
