"""Models that do not fit the data, and losses that say so."""

from __future__ import annotations

import pytest
import torch

from ddp_train.config.schema import TorchvisionConfig
from ddp_train.errors import ConfigError, DataError
from ddp_train.models import build_model
from ddp_train.strategy import cross_entropy, squared_error


@pytest.mark.parametrize(
    ("arch", "side"), [("googlenet", 32), ("inception_v3", 96), ("vit_b_16", 32), ("resnet18", 8), ("alexnet", 64)]
)
def test_a_classifier_of_torchvision_gives_one_tensor_in_training(arch: str, side: int) -> None:
    with torch.device("meta"):  # tensors without content: no time is spent on drawing weights
        model = build_model(TorchvisionConfig(arch=arch), (1, side, side), 10)
        assert model.train()(torch.empty(4, 1, side, side)).shape == (4, 10)


@pytest.mark.parametrize(("arch", "side"), [("inception_v3", 32), ("vit_b_16", 28), ("alexnet", 8), ("maxvit_t", 64)])
def test_images_that_a_classifier_cannot_take_are_named(arch: str, side: int) -> None:
    with pytest.raises(ConfigError, match=f"model.arch={arch}: cannot take images of {side} x {side} pixels: [A-Zs]"):
        build_model(TorchvisionConfig(arch=arch), (3, side, side), 10)


def test_weights_are_drawn_as_if_nothing_had_been_tried_before() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(3)
    expected = resnet18(num_classes=10).state_dict()
    torch.manual_seed(3)
    built = build_model(TorchvisionConfig(arch="resnet18"), (3, 32, 32), 10).state_dict()
    assert all(torch.equal(built[name], tensor) for name, tensor in expected.items())


def test_a_model_with_too_few_outputs_is_refused_in_words() -> None:
    with pytest.raises(DataError, match=r"outputs are of shape \[4, 2\], the data have 10 classes"):
        cross_entropy(10, 0.0)(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(DataError, match=r"outputs are of shape \[4, 2\], the targets are of shape \[4\]"):
        squared_error(torch.zeros(4, 2), torch.zeros(4))
