"""States of hooks in a place of a rank, written after each step and read after its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from ddp_train.recovery.kept_hooks import HooksPlace, KeptHooks
from ddp_train.resilience.kept_memory import KeptMemory, Place

STEPPER = cast(
    Any,
    SimpleNamespace(
        logged=SimpleNamespace(state=lambda: [["a"]], kept=lambda: [[1.5]]),
        losses=SimpleNamespace(passes=[]),
    ),
)


@pytest.fixture
def memory() -> Iterator[KeptMemory]:
    created = KeptMemory.create(1)
    assert created
    yield created
    created.close()


def kept(memory: KeptMemory, place: Place = Place.FIRST_BEFORE) -> Any:
    found = KeptHooks.read(memory.record(0, place))
    assert found
    return found.states


def test_each_change_of_a_state_is_kept(memory: KeptMemory) -> None:
    """By torch, past torch's count of changes, by numpy, of a sign, in a number beside tensors."""
    array = np.zeros(1000)
    table = torch.zeros(100, 100)
    state: dict[str, Any] = {"table": table, "array": torch.from_numpy(array), "steps": []}
    place = HooksPlace(memory.record(0, Place.FIRST_BEFORE))
    changes = [
        lambda: table[99, 99].add_(1),
        lambda: table.data.mul_(-1),  # zeros become -0.0
        lambda: array.__setitem__(500, 7),
        lambda: table.fill_(torch.nan),
        lambda: state.update(table=torch.ones(100, 100)),
        lambda: state.update(table=torch.ones(3, dtype=torch.int8), array=[2**70, "x"]),
    ]
    for step, change in enumerate(changes):
        change()
        state["steps"].append(step)  # the text grows
        place.write(step, state, STEPPER)
        found = kept(memory)
        assert found["steps"] == list(range(step + 1))
        assert place.step == step
        for name in ("table", "array"):
            if isinstance(state[name], torch.Tensor):
                expected, is_kept = (x.view(torch.uint8) for x in (state[name], found[name]))
                assert torch.equal(is_kept, expected), (step, name)
            else:
                assert found[name] == state[name]


def test_what_is_read_is_what_hooks_had(memory: KeptMemory) -> None:
    """Tensors of all kinds, in the containers that a checkpoint takes."""
    states = {
        "user_hooks": [
            [
                "a.A",
                {
                    "turned": torch.arange(6.0).view(2, 3).t(),
                    "wide": torch.ones(1, 3).expand(4, 3),
                    "none": torch.empty(0, 5),
                    "one": torch.tensor(7, dtype=torch.int64),
                    "flags": torch.tensor([True, False]),
                    "half": torch.ones(3, dtype=torch.bfloat16),
                    "conjugate": torch.tensor([1 + 2j]).conj(),
                    "learned": torch.ones(2, requires_grad=True),
                },
            ],
            ["b.B", (torch.ones(1), torch.eye(3).to_sparse(), Counter("aab"), {1, 2}, None)],
        ],
        "metrics": {"seconds": 1.5},
    }
    HooksPlace(memory.record(0, Place.FIRST_BEFORE)).write(3, states, STEPPER)
    (_, first), (_, second) = kept(memory)["user_hooks"]
    for name, tensor in states["user_hooks"][0][1].items():  # type: ignore[index,union-attr]
        assert torch.equal(first[name], tensor) and first[name].dtype == tensor.dtype, name
        assert first[name].shape == tensor.shape and not first[name].requires_grad
    assert type(second) is tuple and second[2:] == (Counter("aab"), {1, 2}, None)
    assert torch.equal(second[0], torch.ones(1))
    assert torch.equal(second[1].to_dense(), torch.eye(3))
    assert kept(memory)["metrics"] == {"seconds": 1.5}


def test_tensors_lie_beside_the_text_and_stay_in_their_place(memory: KeptMemory) -> None:
    """Packed with it, 100 MB took 0.26 s a step."""
    before, after = (
        HooksPlace(memory.record(0, place)) for place in (Place.FIRST_BEFORE, Place.FIRST_AFTER)
    )
    table = torch.zeros(10**6)
    before.write(1, {"table": table}, STEPPER)
    table.add_(1)
    after.write(1, {"table": table}, STEPPER)
    assert memory.record(0, Place.FIRST_BEFORE).text_bytes < 10_000
    assert kept(memory)["table"].sum() == 0
    assert kept(memory, Place.FIRST_AFTER)["table"].sum() == 10**6
    after.drop()
    assert KeptHooks.read(memory.record(0, Place.FIRST_AFTER)) is None
