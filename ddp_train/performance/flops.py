"""Floating-point operations of a model, counted, and the peak of known GPUs: what model-FLOP
utilisation is made of.

Counted are matrix products, convolutions and attention, as torch.utils.flop_counter knows them, of
a forward and a backward pass: what the model asks for, a multiplication and an addition as two.
What is computed again to save memory does not count (PaLM, arXiv:2204.02311, appendix B). Attention
counts whole, its causal half not left out, as there.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import sys
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from ddp_train.data.datasets import BatchSource
from ddp_train.data.rng import keyed_generators
from ddp_train.performance.activation_checkpointing import without_recomputation
from ddp_train.tasks.task import ModelWithTask, Task
from ddp_train.tensor_tree import map_tensors

PEAKS = {
    "B200": {"bf16": 2_250, "tf32": 1_125},
    "H200": {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "H100 80GB HBM3": {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9},  # the SXM module
    "H100 PCIe": {"bf16": 756, "tf32": 378, "fp32": 51.2},
    "A100": {"bf16": 312, "tf32": 156, "fp32": 19.5},
    "L40S": {"bf16": 362, "tf32": 183, "fp32": 91.6},
    "L4": {"bf16": 121, "tf32": 60, "fp32": 30.3},
    "V100-SXM2": {"fp16": 125, "fp32": 15.7},
    "T4": {"fp16": 65, "fp32": 8.1},
}
"""TFLOP/s of dense matrix products, from NVIDIA's data sheets of each (those with sparsity halved).
A part of the name that the driver gives -> number format. fp16 is as fast as bf16 where not
given."""
log = logging.getLogger(__name__)


def peak_flops(gpu_name: str, precision: str, tf32: bool) -> float | None:
    """Operations per second of one GPU at most, or None where nothing is known. precision: as
    tuning.precision."""
    of_gpu = next(
        (peaks for name, peaks in PEAKS.items() if name in gpu_name.replace("NVIDIA ", "")), {}
    )
    if precision == "fp32" and tf32:
        precision = "tf32" if "tf32" in of_gpu else "fp32"
    found = of_gpu.get(precision, of_gpu.get("bf16") if precision == "fp16" else None)
    return found * 1e12 if found else None


def flops_of(model: nn.Module, task: Task, batch: Any) -> int | None:
    """The operations of a forward and a backward pass over a batch. Only the shapes of the batch
    matter.

    Copies of the model and of the task run on the meta device: nothing is computed, and both stay
    as they are, as do the generators of random numbers. The model trains, but for its batch norms,
    which over all processes would wait for the others. None where that fails, as in a model that
    looks at values: the log says why.
    """
    counter = FlopCounterMode(display=False)
    try:
        shapes, counted = empty_copy(model, task)
        shapes.train()
        for norm in (module for module in shapes.modules() if isinstance(module, _BatchNorm)):
            norm.eval()
        without_recomputation(shapes)
        inputs = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), batch)
        with keyed_generators(), nothing_compiled(), torch.enable_grad(), counter:
            counted.loss(shapes, inputs)[0].backward()
    except Exception as error:  # noqa: BLE001  a model of anyone's may raise anything, and this is only a figure
        log.info("the operations of the model were not counted: %r", error)
        return None
    return counter.get_total_flops() or None


def flops_of_samples(module: ModelWithTask, source: BatchSource, count: float = 1) -> int | None:
    """Those of so many samples like a data set's first one, see `flops_of`. None for none."""
    if count:
        flops = flops_of(module.model, module.task, one_sample(source, module.model))
    else:
        flops = None
    return flops and round(flops * count)


def one_sample(source: BatchSource, model: nn.Module) -> Any:
    """A batch of one sample, its numbers and pixels in the model's precision. Generators stay as
    they are."""
    dtype = next(model.parameters()).dtype
    with keyed_generators():
        batch = source.get_batch(np.array([0]), None)
    return map_tensors(
        lambda tensor: (
            tensor.to(dtype)
            if tensor.is_floating_point() or tensor.dtype == torch.uint8
            else tensor
        ),
        batch,
    )


def empty_copy(model: nn.Module, task: Any = None) -> tuple[nn.Module, Any]:
    """Copies whose tensors have shapes and no content: those of modules, and those that the task
    has as attributes."""
    users = [
        getattr(part, "__self__", None) for part in getattr(task, "__dict__", {}).values()
    ]  # see `complete`
    beside = [
        value for one in (task, *users) for value in (one, *getattr(one, "__dict__", {}).values())
    ]
    modules = [model, *(one for one in beside if isinstance(one, nn.Module))]
    of_modules = itertools.chain.from_iterable(
        (*one.parameters(), *one.buffers()) for one in modules
    )
    there: dict[int, Any] = {}
    for tensor in (*of_modules, *(one for one in beside if isinstance(one, Tensor))):
        empty = torch.empty_like(tensor, device="meta")
        there[id(tensor)] = (
            nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        )
    return copy.deepcopy((model, task), there)


def nothing_compiled() -> AbstractContextManager[Any]:
    """Functions inside a model that are compiled run as they were written."""
    loaded = "torch._dynamo" in sys.modules  # if not, there are none; loading it takes a second
    if loaded:
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()
