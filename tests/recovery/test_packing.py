"""States of any objects, packed beside their tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ddp_train.errors import LaunchError
from ddp_train.recovery.kept_layout import KeptTensor
from ddp_train.recovery.packing import StatePacker, unpacked


def test_a_state_comes_back_with_its_own_types() -> None:
    packer = StatePacker("cpu")
    weight = torch.arange(6.0).view(2, 3).T
    state = OrderedDict(
        weight=weight,
        again=[weight, weight[0]],
        numbers={3: (1, 2.5, None, True), "texts": ["a", b"b"], "counts": Counter("aab")},
        dtype=torch.bfloat16,
        sparse=torch.eye(3).to_sparse(),
    )
    found = unpacked(packer.packed(state, is_same=True), lambda kept: packer.common[kept.number])
    assert found["weight"] is weight and found["again"][0] is weight
    assert len(packer.common) == 4, "one once, a view of it, and places and values"
    assert found["numbers"] == state["numbers"] and type(found) is OrderedDict
    assert found["dtype"] is torch.bfloat16
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.arange(8).view(2, 4).T,
        torch.tensor([True, False]),
    ],
)
def test_tensors_on_other_devices_are_packed_whole(tensor: Tensor) -> None:
    """As Adam's counts of steps, which are on the CPU."""
    packer = StatePacker("cuda:0")
    found = unpacked(packer.packed({"step": tensor}, is_same=True), _none)["step"]
    assert not packer.common
    assert found.dtype == tensor.dtype and torch.equal(found, tensor)


def test_what_is_known_to_differ_is_of_rank_0() -> None:
    packer = StatePacker("cpu")
    buffer = torch.zeros(1)
    assert packer.add_own(buffer) == KeptTensor(True, 0)
    packer.packed({"momentum": torch.zeros(2), "buffer": buffer}, is_same=True)
    packer.packed({"queue": torch.zeros(3)}, is_same=False)
    assert packer.of_leader == {1} and len(packer.common) == 2
    with pytest.raises(LaunchError, match="sparse_coo"):
        packer.add_own(torch.eye(2).to_sparse())


def test_code_is_not_run() -> None:
    packer = StatePacker("cpu")
    for value in (print, torch.nn.Identity(), Path("a"), np.float64(1)):
        with pytest.raises(LaunchError, match="which is not plain data"):
            unpacked(packer.packed({"value": value}, is_same=True), _none)


def _none(kept: KeptTensor) -> Tensor:
    raise AssertionError(kept)
