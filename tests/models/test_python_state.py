"""What Python keeps of a model beside its weights, compared between two moments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddp_train.models.python_state import changed, state_of


class Anchors(nn.Module):
    def __init__(self, sizes: Tensor) -> None:
        super().__init__()
        self.sizes = [sizes]


@pytest.mark.parametrize(
    ("now", "is_changed"),
    [
        (torch.tensor([16.0, 32.0], dtype=torch.float64), False),
        (torch.tensor([16.0, 33.0]), True),
        (torch.tensor([16, 32]), True),
        (torch.tensor([[16.0, 32.0]]), True),
    ],
)
def test_a_tensor_in_another_precision_is_the_same(now: Tensor, is_changed: bool) -> None:
    """Detectors of torchvision convert their anchors to the dtype of a batch."""
    model = Anchors(torch.tensor([16.0, 32.0]))
    before = state_of({"model": model})
    model.sizes = [now]
    assert bool(changed(before, state_of({"model": model}))) is is_changed
