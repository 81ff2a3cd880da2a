"""The batch of no samples, of what users' collate functions return."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.loader import Loader, LoaderOptions
from ddp_train.data.no_samples import without_samples
from ddp_train.data.user_dataset import UserDataset
from ddp_train.errors import DataError
from ddp_train.tensor_tree import named_tensors
from tests.support.batch_types import Forgetful
from tests.support.batch_types import batch_of as of_any_type

Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclass
class Texts:
    ids: torch.Tensor
    count: int


def batch_of(count: int) -> dict[str, Any]:
    return {
        "images": torch.ones(count, 3, 4, dtype=torch.bfloat16),
        "time major": torch.ones(5, count, 2),
        "pairs": torch.ones(count, count),
        "targets": Pair(torch.ones(count, dtype=torch.int64), np.ones((count, 2), np.float32)),
        "names": ["a"] * count,
        "boxes": [{"box": torch.ones(4)}] * count,
        "length": 7,
        "count": count,
        "counts of classes": torch.tensor([count, 0]),
        "scale": torch.tensor([0.5, 2.0]),
        "key": "fixed",
        "texts": Texts(torch.ones(count, 6), count),
        "edges": torch.ones(2, 3 * count),
        "of a library": UserDict(ids=torch.ones(count, 2)),
    }


def test_none_is_what_one_and_two_copies_lead_to() -> None:
    none = without_samples(batch_of(1), batch_of(2))
    assert none["images"].shape == (0, 3, 4) and none["images"].dtype == torch.bfloat16
    assert none["time major"].shape == (5, 0, 2)
    assert none["pairs"].shape == (0, 0)
    assert none["targets"].inputs.shape == (0,) and none["targets"].targets.shape == (0, 2)
    assert (none["names"], none["boxes"], none["length"], none["count"]) == ([], [], 7, 0)
    assert none["counts of classes"].tolist() == [0, 0]
    assert none["scale"].tolist() == [0.5, 2.0]
    assert none["key"] == "fixed"
    assert none["texts"].ids.shape == (0, 6) and none["texts"].count == 0
    assert none["edges"].shape == (2, 0)
    assert type(none["of a library"]) is UserDict and none["of a library"]["ids"].shape == (0, 2)


def test_samples_of_random_length_are_cut_in_the_right_dimension() -> None:
    assert without_samples(torch.ones(1, 5), torch.ones(2, 7)).shape == (0, 5)


def test_an_unknown_object_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="a batch has a Generator, which cannot be made"):
        without_samples(torch.Generator(), torch.Generator())


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3), number


@pytest.mark.parametrize("data", [Noisy(), TensorDataset(torch.rand(4, 3), torch.arange(4))])
def test_a_loader_gives_batches_of_no_samples(data: Any) -> None:
    plan = BatchPlan(4, 3, 1, 2, 0, rank=2, world_size=3)
    options = LoaderOptions(dtype=torch.float64)
    source = UserDataset(data, 0)
    loader = Loader(source, plan.from_step(0), "cpu", options, has_empty_batches=True)
    (full, empty) = loader
    assert len(full.inputs) == 1
    assert empty.micro_batch.num_real == 0
    assert (empty.inputs.shape, empty.inputs.dtype) == ((0, 3), torch.float64)
    assert (empty.targets.shape, empty.targets.dtype) == ((0,), torch.int64)


@pytest.mark.parametrize(
    ("samples", "batch", "accumulation", "processes", "expected"),
    [
        (20, 6, 1, 3, True),
        (20, 6, 1, 2, False),
        (18, 6, 1, 3, False),
        (2, 6, 1, 3, True),
        (12, 2, 1, 3, True),
        (21, 7, 3, 3, True),
        (20, 6, 1, 1, False),
    ],
)
def test_a_plan_knows_whether_a_process_may_have_none(
    samples: int, batch: int, accumulation: int, processes: int, expected: bool
) -> None:
    plan = BatchPlan(samples, batch, accumulation, 0, 0, world_size=processes)
    assert plan.has_empty_parts is expected
    steps = plan.steps_per_epoch
    parts = [
        part.num_real
        for rank in range(processes)
        for part in BatchPlan(
            samples, batch, accumulation, steps, 0, rank, processes
        ).micro_batches()
    ]
    assert (0 in parts) is expected


def test_objects_of_any_type_are_cut() -> None:
    none = without_samples(of_any_type(1), of_any_type(2))
    rows = {path: list(tensor.shape) for path, tensor in named_tensors(none)}
    of_time = {path: shape for path, shape in rows.items() if 0 not in shape}
    assert of_time == {
        "['graphs'].store['first']": [1],  # where graphs begin, and the end
        "['packed'][1]": [3],  # the lengths at each of three times
    }
    assert none["packed"].batch_sizes.tolist() == [0, 0, 0]
    assert (none["graphs"].count, none["dataclass"].count, none["dataclass"].longest) == (0, 0, 6)
    assert (none["encoding"].words, none["names"], none["boxes"]) == ([], [], [])
    assert [type(part) for part in none.values()] == [
        type(part) for part in of_any_type(1).values()
    ]


def test_an_object_that_leads_to_itself_is_cut() -> None:
    one, two = Forgetful(torch.ones(1), torch.ones(1)), Forgetful(torch.ones(2), torch.ones(2))
    one.me, two.me = one, two  # type: ignore[attr-defined]
    none = without_samples(one, two)
    assert none.me is none and len(none.x) == 0 and len(one.x) == 1
