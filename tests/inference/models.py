"""Models for the tests of inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Returns(nn.Module):
    """A model with given outputs, whatever its inputs are."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, _: Any) -> Any:
        return self.outputs
