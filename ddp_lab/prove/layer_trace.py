"""A record of a forward pass, layer by layer, and the first layer that mixes the samples of a
micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_train.data.rng import global_states
from ddp_train.tensor_tree import tensors

MOST_BYTES = 2**28
"""Most bytes of inputs and outputs of layers that are kept to find the first one that differs."""
GENERATORS = ("torch's", "numpy's (numpy.random)", "Python's (random)")
"""Names of the generators, in the order of `rng.global_states`."""
TINY = 1e-30


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass
class Trace:
    """One forward pass."""

    calls: list[LayerCall] = field(default_factory=list)
    """The calls of layers, in the order in which they ended."""
    loss: float = 0.0
    units: float = 0.0
    drew: dict[str, str] = field(default_factory=dict)
    """The generators of numpy and Python that moved, and where: the name of a layer, or "" outside
    of the model."""
    is_complete: bool = True
    """False if the calls took more than MOST_BYTES."""

    def inputs(self, name: str) -> list[Tensor]:
        """The inputs of the first call of a layer; none if it was not called."""
        return next((call.inputs for call in self.calls if call.name == name), [])


class _Recorder:
    """Hooks of layers that fill a trace."""

    def __init__(self, trace: Trace, keeps_calls: bool) -> None:
        self.trace = trace
        self.keeps_calls = keeps_calls
        self.kept_bytes = 0
        self.states_before: list[tuple[bytes, ...]] = []
        """The states of all generators when the layers began that have not ended."""

    def enter(self, layer: nn.Module, args: Any) -> None:
        self.states_before.append(global_states())

    def leave(self, name: str) -> Callable[..., None]:
        """A hook for the end of the layer of this name."""

        def hook(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.note_draws(self.states_before.pop(), name)
            if self.keeps_calls:
                # objects of transformers are mappings
                plain = dict(output) if hasattr(output, "items") else output
                self._keep(name, list(tensors((args, kwargs))), list(tensors(plain)))

        return hook

    def note_draws(self, before: tuple[bytes, ...], name: str) -> None:
        """Note the generators of numpy and Python that have moved."""
        states = zip(GENERATORS, before, global_states(), strict=True)
        for generator, old, new in itertools.islice(states, 1, None):
            if old != new:
                self.trace.drew.setdefault(generator, name)

    def _keep(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.kept_bytes += sum(tensor.nbytes for tensor in (*inputs, *outputs))
        self.trace.is_complete &= self.kept_bytes <= MOST_BYTES
        if self.trace.is_complete:
            inputs = [tensor.detach() for tensor in inputs]
            outputs = [tensor.detach().clone() for tensor in outputs]
            self.trace.calls.append(LayerCall(name, inputs, outputs))


@contextmanager
def recording(model: nn.Module, trace: Trace, keeps_calls: bool) -> Iterator[None]:
    """Inside, note where the generators of numpy and Python move, and, if `keeps_calls`, what goes
    through each layer."""
    recorder = _Recorder(trace, keeps_calls)
    handles = []
    for name, layer in model.named_modules():
        handles.append(layer.register_forward_pre_hook(recorder.enter))
        handles.append(layer.register_forward_hook(recorder.leave(name), with_kwargs=True))
    before = global_states()
    try:
        yield
        recorder.note_draws(before, "")
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Culprit:
    """The first layer whose output for a sample depends on the others of its micro-batch."""

    name: str
    layer: nn.Module

    @property
    def is_batch_norm(self) -> bool:
        return isinstance(self.layer, _BatchNorm)


def first_mixing(
    model: nn.Module, whole: Trace, parts: Sequence[Trace], tolerance: float
) -> Culprit | None:
    """The first layer that gives rows of a part something else than the same rows of the whole
    batch.

    None if there is none, or it cannot be seen: in batches that are padded anew, rows have other
    lengths.
    """
    for place, call in enumerate(whole.calls):
        others = [part.calls[place] for part in parts if place < len(part.calls)]
        if len(others) < len(parts) or any(other.name != call.name for other in others):
            return None
        if _largest_difference(call.outputs, [other.outputs for other in others]) <= tolerance:
            continue
        name = call.name
        inputs_differ = _largest_difference(call.inputs, [other.inputs for other in others])
        while inputs_differ > tolerance:  # it only passes on what a caller mixed
            name = name.rpartition(".")[0]
            if not name:
                break
            of_parts = [part.inputs(name) for part in parts]
            inputs_differ = _largest_difference(whole.inputs(name), of_parts)
        return Culprit(name, model.get_submodule(name))
    return None


def _largest_difference(whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> float:
    """The largest relative difference between the tensors of the whole batch and those of the
    parts, put together; 0 for tensors that cannot be compared."""
    worst = 0.0
    for number, tensor in enumerate(whole):
        rows = [part[number] for part in parts if number < len(part)]
        if len(rows) < len(parts) or not _have_equal_rows(tensor, rows):
            continue
        together = torch.cat(rows)
        if together.shape == tensor.shape:
            difference = float((together - tensor).norm() / max(float(tensor.norm()), TINY))
            if difference > worst:  # nan does not count
                worst = difference
    return worst


def _have_equal_rows(tensor: Tensor, parts: Sequence[Tensor]) -> bool:
    """Tell whether all are numbers in rows of the same shape."""
    if not tensor.is_floating_point() or not tensor.ndim or not tensor.numel():
        return False
    return all(part.ndim == tensor.ndim and part.shape[1:] == tensor.shape[1:] for part in parts)
