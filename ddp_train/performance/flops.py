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
from ddp_train.models.put_back import leaving_nothing, reading_ahead
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
    """Most operations per second of one GPU; None where nothing is known.

    precision: as tuning.precision.
    """
    name = gpu_name.replace("NVIDIA ", "")
    peaks: dict[str, float] = next((PEAKS[part] for part in PEAKS if part in name), {})
    if precision == "fp32" and tf32 and "tf32" in peaks:
        precision = "tf32"
    if precision == "fp16" and "fp16" not in peaks:
        precision = "bf16"
    return peaks[precision] * 1e12 if precision in peaks else None


def flops_of(model: nn.Module, task: Task, batch: Any) -> int | None:
    """Operations of a forward and a backward pass over a batch, of which only the shapes matter.

    Copies of the model and of the task run on the meta device: nothing is computed, and both stay
    as they are, as do the generators of random numbers. The model trains, but for its batch norms,
    which over all processes would wait for the others.

    Returns None where that fails, as in a model that looks at values: the log says why.
    """
    counter = FlopCounterMode(display=False)
    try:
        empty_model, empty_task = empty_copy(model, task)
        empty_model.train()
        for module in empty_model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        without_recomputation(empty_model)
        roots = {"model": model, "task": task}
        unchanged = leaving_nothing("the count of operations", roots, on_copies=True)
        with unchanged, nothing_compiled(), torch.enable_grad(), counter:
            loss, _ = empty_task.loss(empty_model, empty_batch(batch))
            loss.backward()
    except Exception as error:  # noqa: BLE001  a model of anyone's may raise anything, and this is only a figure
        log.info("the operations of the model were not counted: %r", error)
        return None
    return counter.get_total_flops() or None


def flops_of_samples(module: ModelWithTask, source: BatchSource, count: float = 1) -> int | None:
    """Operations of so many samples like a data set's first one, see `flops_of`. None for none."""
    if not count:
        return None
    flops = flops_of(module.model, module.task, one_sample(source, module.model))
    return round(flops * count) if flops else None


def one_sample(source: BatchSource, model: nn.Module) -> Any:
    """A batch of one sample, its numbers and pixels in the model's precision.

    Generators stay as they are.
    """
    dtype = next(model.parameters()).dtype

    def converted(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.dtype == torch.uint8:
            return tensor.to(dtype)
        return tensor

    with reading_ahead(source), keyed_generators():
        batch = source.get_batch(np.array([0]), None)
    return map_tensors(converted, batch)


def empty_batch(batch: Any) -> Any:
    """The batch on the meta device: shapes without content."""
    return map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), batch)


def empty_copy(model: nn.Module, task: Any = None) -> tuple[nn.Module, Any]:
    """Copies of a model and of a task on the meta device: shapes without content.

    Tensors are those of modules, and those that the task has as attributes.
    """
    # The user's own task is behind a method of one of its attributes, see `complete`.
    owners = [getattr(part, "__self__", None) for part in _attributes(task)]
    objects = [task, *owners]
    for owner in (task, *owners):
        objects += _attributes(owner)
    there: dict[int, Any] = {}
    for value in (model, *objects):
        if isinstance(value, nn.Module):
            for tensor in (*value.parameters(), *value.buffers()):
                there[id(tensor)] = _empty(tensor)
        elif isinstance(value, Tensor):
            there[id(value)] = _empty(value)
    return copy.deepcopy((model, task), there)


def _attributes(value: Any) -> list[Any]:
    return list(getattr(value, "__dict__", {}).values())


def _empty(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, tensor.requires_grad)
    return empty


def nothing_compiled() -> AbstractContextManager[Any]:
    """A context in which compiled functions inside a model run as they were written."""
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()  # loading it takes a second, and it has compiled nothing
