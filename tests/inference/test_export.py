"""Models that cannot be exported. What can is in test_inference_of_runs.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.errors import ConfigError, DataError
from ddp_train.inference.export import export_model
from tests.inference.models import Returns

MANIFEST = {"input_shape": [4], "input_dtype": "float32", "outputs": 2, "step": 1}


class Forgetful(nn.Linear):
    """Not the same twice."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + torch.rand(())


class Depends(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if input.sum() > 0 else input


@pytest.mark.parametrize(
    ("model", "manifest", "error", "message"),
    [
        (Forgetful(4, 2), MANIFEST, DataError, "outputs differ from the model's by"),
        (Depends(4, 2), MANIFEST, DataError, "the model cannot be exported: "),
        (
            nn.Linear(4, 2),
            {},
            ConfigError,
            (
                "the samples of the data set do not begin with one input tensor; only models whose"
                " input is one tensor"
            ),
        ),
        (Returns({"logits": torch.zeros(2)}), MANIFEST, ConfigError, "the model returns a dict"),
    ],
)
def test_what_cannot_be_exported_is_named(
    model: nn.Module, manifest: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        export_model(model, manifest, tmp_path, ["torch"])
    assert list(tmp_path.iterdir()) == []


def test_export_of_a_text_model_says_its_length(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 5))
    manifest = {"input_shape": [4], "input_dtype": "int64", "outputs": 5}
    done = export_model(model, manifest, tmp_path, ["torch"])
    assert done["torch"]["takes"] == (
        "any number of samples of exactly 4 tokens: pad or cut others"
    )
