"""The states of generators of random numbers: torch's, numpy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def is_generator(value: Any) -> bool:
    """Whether an object is a generator with a state. One of the operating system's has none."""
    return isinstance(value, KINDS) and not isinstance(value, random.SystemRandom)


def get_state(generator: Any) -> Any:
    """A copy of the state, for `set_state`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def set_state(generator: Any, state: Any) -> None:
    """Put a generator back to a state that `get_state` has returned."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)
