"""A counter-based random number generator.

A draw is a hash of its key (seed, purpose, epoch) and its counter (sample).

A draw therefore depends neither on earlier draws nor on the process or loader worker that makes it.
The hash is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), in integer arithmetic that is exact on
CPU and GPU.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def hash_key(*parts: int | str) -> int:
    """A 63-bit key from several numbers or strings; their order matters."""
    state = 0
    for part in parts:
        number = int.from_bytes(part.encode(), "little") if isinstance(part, str) else part
        state = (state ^ (number & _MASK)) + _GAMMA & _MASK
        state = (state ^ state >> 30) * _MIX_1 & _MASK
        state = (state ^ state >> 27) * _MIX_2 & _MASK
        state ^= state >> 31
    return state >> 1


def number_of_digest(digest: bytes) -> int:
    """A number below 2**61 that identifies what a digest of 8 bytes or more is of."""
    return int.from_bytes(digest[:8], "little") >> 3


def hash_bits(key: int, counters: Tensor) -> Tensor:
    """A random non-negative int64 for each counter (int64, any shape), on their device."""
    state = counters * _signed(_GAMMA) + _signed(hash_key(key))
    return _mix_(state).bitwise_and_((1 << 63) - 1)


def random_bits(keys: Tensor, draws: int) -> Tensor:
    """64 random bits for each draw of each key: int64 [n, draws], on the device of the keys.

    Row i is SplitMix64 with the state keys[i]: as few operations as its quality takes, in place.

    keys: int64 [n], hashed already.
    draws: numbers for each key.
    """
    places = torch.arange(1, draws + 1, device=keys.device).mul_(_signed(_GAMMA))
    return _mix_(keys[:, None] + places)


def uniform(key: int, counters: Tensor, draws: int) -> Tensor:
    """Uniform numbers in [0, 1): float64 [n, draws]. Row i depends on key and counters[i] only.

    counters: int64 [n].
    draws: numbers for each counter.
    """
    counters_of_draws = counters[:, None] * draws + torch.arange(draws, device=counters.device)
    bits = shift(hash_bits(key, counters_of_draws), 10)
    return bits.double() * 2.0**-53


def order(key: int, count: int) -> Tensor:
    """A random permutation of range(count), int64 [count]."""
    return hash_bits(key, torch.arange(count)).argsort(stable=True)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _mix_(state: Tensor) -> Tensor:
    """SplitMix64's output function of 64 bits of state, which are overwritten."""
    state.bitwise_xor_(shift(state, 30)).mul_(_signed(_MIX_1))
    state.bitwise_xor_(shift(state, 27)).mul_(_signed(_MIX_2))
    return state.bitwise_xor_(shift(state, 31))


def shift(bits: Tensor, count: int) -> Tensor:
    """The bits shifted to the right, with zeros from the left: torch's `>>` keeps the sign."""
    return (bits >> count).bitwise_and_((1 << 64 - count) - 1)


@contextlib.contextmanager
def keyed_generators() -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds the global generators that code of others draws from.

    They are torch's on the host, numpy's and Python's.

    At the end they are as before, so that training's own draws do not move.
    """
    before = _States()
    try:
        yield _seed_global_generators
    finally:
        before.restore()


class _States:
    """The states of the global generators at the moment when it is made."""

    def __init__(self) -> None:
        self.torch = torch.get_rng_state()
        self.numpy = np.random.get_state()
        self.python = random.getstate()

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


class InterruptedDraws:
    """Keyed global generators for code that draws now and then, while others draw in between."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.states: _States | None = None
        """The states that its draws go on from; None before the first one."""

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """A context in which the global generators go on from these states."""
        with keyed_generators() as seed_generators:
            if self.states is None:
                seed_generators(self.key)
            else:
                self.states.restore()
            try:
                yield
            finally:
                self.states = _States()


def _seed_global_generators(key: int) -> None:
    # torch.manual_seed would seed the generators of the GPUs too.
    torch.default_generator.manual_seed(key)
    # Of one seed of 32 bits numpy and torch make the same sequence: both are a Mersenne Twister.
    np.random.seed(hash_key(key, "numpy") & 0xFFFFFFFF)
    random.seed(key)


def global_states() -> tuple[bytes, ...]:
    """The states of the generators of torch, numpy and Python, to see whether something draws."""
    # The words change once in 624 draws, the position always.
    _, words, *position = cast("tuple[Any, ...]", np.random.get_state())
    torch_state = torch.get_rng_state().numpy().tobytes()
    numpy_state = words.tobytes() + repr(position).encode()
    python_state = repr(random.getstate()).encode()
    return torch_state, numpy_state, python_state


def draw_mark(generator: torch.Generator | None = None) -> int:
    """Draw a number of 62 bits, which marks the state of a generator.

    If a later call returns the same number, the generator was put back to the same state:
    activation checkpointing does this before it computes a part of a model once more.

    generator: a generator on the CPU; None: torch's default one. The draw moves it.
    """
    return int(torch.randint(1 << 62, (), generator=generator, device="cpu"))


def moved_by_marks_alone(before: Tensor, after: Tensor, marks: int) -> bool:
    """Tell whether a generator came from one state to another by `draw_mark` alone, or not at all.

    marks: how often that was called, at most.
    """
    if torch.equal(before, after):
        return True
    if len(before) != len(torch.default_generator.get_state()):
        return False  # of a GPU
    generator = torch.Generator()
    generator.set_state(before)
    for _ in range(marks):
        draw_mark(generator)
        if torch.equal(generator.get_state(), after):
            return True
    return False


class StepSeed:
    """Seeds torch's default generators, which dropout uses, before each step.

    The seed depends on the run's seed, the shard index and the step.
    """

    def __init__(self, seed: int, shard_index: int, device: str) -> None:
        """shard_index: the part of the global batch: a rank, or a virtual shard."""
        self.key = hash_key(seed, "step", shard_index)
        self.generators = [torch.default_generator]
        if device.startswith("cuda"):
            torch.cuda.init()
            self.generators.append(torch.cuda.default_generators[torch.device(device).index])

    def __call__(self, step: int) -> None:
        key = self._key_of(step)
        for generator in self.generators:
            generator.manual_seed(key)

    def has_moved(self, step: int, marks: int = 0) -> bool:
        """Tell whether something but `draw_mark` has drawn since this step was seeded.

        marks: how often that was called, at most.
        """
        key = self._key_of(step)
        for generator in self.generators:
            seeded = torch.Generator(generator.device).manual_seed(key)
            if not moved_by_marks_alone(seeded.get_state(), generator.get_state(), marks):
                return True
        return False

    def _key_of(self, step: int) -> int:
        # Mersenne Twister's seeding decorrelates neighbouring keys.
        return self.key + step & _MASK >> 1
