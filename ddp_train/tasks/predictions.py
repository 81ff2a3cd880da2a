"""Outputs and targets of a batch, which the metrics of torchmetrics are updated with.

Both are trees of tensors. A tensor has a sample in each row, a list one in each entry; a dict or a
tuple has all samples in each of its values. So the boxes of detection, of which each image has
another number, are a list of dicts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ddp_train.text import with_article


class Predictions(NamedTuple):
    """Outputs and targets of a batch."""

    outputs: Any
    targets: Any

    @property
    def is_empty(self) -> bool:
        """True if there are no targets."""
        if isinstance(self.targets, Tensor):
            return not self.targets.numel()
        return not length_of(self.targets)

    def second_half(self) -> Predictions:
        """The second half of the samples; all of them if outputs and targets do not correspond."""
        length = length_of(self.outputs)
        if length is None or length < 2 or length != length_of(self.targets):
            return self
        start = length // 2
        return Predictions(_from_sample(start, self.outputs), _from_sample(start, self.targets))


def is_tree_of_tensors(value: Any) -> bool:
    """True if a value consists of tensors, in lists, dicts and tuples."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return all(is_tree_of_tensors(part) for part in value)
    return isinstance(value, Tensor)


def length_of(samples: Any) -> int | None:
    """The number of samples in a tree of tensors; None if its values differ in length."""
    if isinstance(samples, Tensor):
        return len(samples) if samples.ndim else 0
    if isinstance(samples, list):
        return len(samples)
    values = samples.values() if isinstance(samples, dict) else samples
    lengths = {length_of(value) for value in values}
    if len(lengths) != 1:
        return None
    return lengths.pop()


def description(samples: Any) -> str:
    """A tree of tensors in words, for a message."""
    if isinstance(samples, Tensor):
        return f"{list(samples.shape)} of {samples.dtype}"
    if isinstance(samples, dict):
        return f"a dict of {', '.join(map(str, samples))}"
    return f"{with_article(type(samples).__name__)} of {len(samples)}"


def _from_sample(start: int, samples: Any) -> Any:
    if isinstance(samples, Tensor | list):
        return samples[start:]
    if isinstance(samples, dict):
        return {name: _from_sample(start, value) for name, value in samples.items()}
    return tuple(_from_sample(start, value) for value in samples)
