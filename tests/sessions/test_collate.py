"""Sessions whose collate_fn draws random numbers, or mixes samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ddp_train.distributed.world import World
from ddp_train.sessions import loader
from tests.sessions.loops import sgd
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

Sample = tuple[Tensor, int]
OWN = np.random.default_rng(0)


def data(lengths: int) -> list[Sample]:
    """Twelve sequences of some lengths, each with a label."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(2 + n % lengths, generator=generator).double(), n) for n in range(12)]


def padded(samples: list[Sample]) -> list[Tensor]:
    sequences, labels = zip(*samples, strict=True)
    return [pad_sequence(list(sequences), batch_first=True), torch.tensor(labels)]


def sorted_by_sum(samples: list[Sample]) -> list[Tensor]:
    return padded(sorted(samples, key=lambda sample: -float(sample[0].sum())))


def two_views(samples: list[Sample]) -> Tensor:
    inputs, _ = padded(samples)
    return torch.cat([inputs, 2 * inputs])


def drawn(samples: list[Sample]) -> list[Tensor]:
    inputs, labels = padded(samples)
    return [inputs + torch.rand(()).double(), labels]


def drawn_by_own_generator(samples: list[Sample]) -> list[Tensor]:
    inputs, labels = padded(samples)
    return [inputs * OWN.random(), labels]


def mixed(samples: list[Sample]) -> list[Tensor]:
    inputs, labels = padded(samples)
    return [0.7 * inputs + 0.3 * inputs.roll(1, 0), labels]


def centred(samples: list[Sample]) -> list[Tensor]:
    inputs, labels = padded(samples)
    return [inputs - inputs.mean(), labels]


def told(world: World, collate: Callable[[list[Sample]], Any], lengths: int) -> list[str]:
    """The warnings of run.loader."""
    messages: list[str] = []
    loader.log.warning = lambda text, *names: messages.append(text % names)  # type: ignore[method-assign]
    own = OWN.bit_generator.state
    with session_on(world) as run:
        model = run.wrap(nn.Linear(4, 1))
        before = torch.get_rng_state()
        batches = run.loader(data(lengths), global_batch_size=6, collate_fn=collate)
        assert torch.equal(before, torch.get_rng_state())
        run.resume(model=model, optimizer=sgd(model))
        assert len(batches) == 2
    assert OWN.bit_generator.state == own
    return messages


@pytest.mark.parametrize(
    ("collate", "what"),
    [
        (drawn, "draws random numbers"),
        (drawn_by_own_generator, "draws random numbers"),
        (mixed, "mixes the samples"),
        (centred, "mixes the samples"),
    ],
)
def test_batches_that_depend_on_their_division_are_told(
    collate: Callable[[list[Sample]], Any], what: str
) -> None:
    leader, *others = on_ranks(3, told, collate, 1)
    (message,) = leader
    assert message.startswith(f"run.loader: collate_fn {what}")
    assert others == [[], []]


@pytest.mark.parametrize("lengths", [1, 3])
@pytest.mark.parametrize("collate", [padded, sorted_by_sum, two_views])
def test_batches_of_independent_rows_are_not_told(
    collate: Callable[[list[Sample]], Any], lengths: int
) -> None:
    assert on_ranks(3, told, collate, lengths) == [[], [], []]


def test_one_process_may_mix_its_batch() -> None:
    assert on_ranks(1, told, mixed, 1) == [[]]
