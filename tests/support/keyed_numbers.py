"""Keyed noise in numpy, written a second time, for plain loops that know nothing of processes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ddp_train.data.rng import hash_key

_GAMMA = 0x9E3779B97F4A7C15


class KeyedNumbers:
    """What each call of a step, or of a batch that is scored, draws for some samples."""

    def __init__(
        self,
        samples: Sequence[int] | np.ndarray,
        seed: int = 0,
        epoch: int | None = 0,
        step: int = 0,
    ) -> None:
        """epoch: None in an evaluation."""
        if epoch is None:
            key = hash_key("noise of an evaluation")
        else:
            key = hash_key(seed, "noise of a step", epoch, step)
        numbers = np.asarray(samples).astype(np.uint64)
        with np.errstate(over="ignore"):
            state = numbers * np.uint64(_GAMMA) + np.uint64(hash_key(key))
        self.keys = _mixed(state) & np.uint64((1 << 63) - 1)
        self.calls = 0

    def bits(self, *shape: int) -> np.ndarray:
        """uint64 [samples, *shape]. Each call of these methods is the next one in the step."""
        count = math.prod(shape)
        with np.errstate(over="ignore"):
            keys = self.keys + np.uint64(hash_key("call", self.calls))
            places = np.arange(1, count + 1).astype(np.uint64) * np.uint64(_GAMMA)
            state = keys[:, None] + places
        self.calls += 1
        return _mixed(state).reshape(len(self.keys), *shape)

    def uniform(self, *shape: int) -> Tensor:
        return torch.from_numpy((self.bits(*shape) >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def normal(self, *shape: int) -> Tensor:
        odd = (self.bits(*shape) >> np.uint64(12)).astype(np.float64) * 2 + 1
        return torch.special.ndtri(torch.from_numpy(odd * 2.0**-53))

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        return (self.uniform(*shape) * (high - low)).long() + low

    def kept(self, p: float, *shape: int) -> Tensor:
        """What dropout multiplies by."""
        is_kept = (self.bits(*shape) >> np.uint64(1)).astype(np.float64) >= p * 2.0**63
        return torch.from_numpy(is_kept).double() / (1 - p)


def _mixed(state: np.ndarray) -> np.ndarray:
    """SplitMix64's output function."""
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
