"""Models that do not fit the data, and losses that say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.assembly.model import build_user_model
from ddp_train.errors import ConfigError, DataError
from ddp_train.models.torchvision.config import TorchvisionConfig
from ddp_train.options.custom import CustomModelConfig
from ddp_train.tasks.builtin import Classification, Regression
from ddp_train.tasks.task import ModelWithTask
from tests.support.jobs import model_of


@pytest.mark.parametrize(
    ("arch", "side"),
    [("googlenet", 32), ("inception_v3", 96), ("vit_b_16", 32), ("resnet18", 8), ("alexnet", 64)],
)
def test_torchvision_classifier_gives_one_tensor_in_training(arch: str, side: int) -> None:
    with torch.device("meta"):  # tensors without content: no time is spent on drawing weights
        model = model_of(TorchvisionConfig(arch=arch), (1, side, side), 10)
        assert model.train()(torch.empty(4, 1, side, side)).shape == (4, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "side"), [("inception_v3", 32), ("vit_b_16", 28), ("alexnet", 8), ("maxvit_t", 64)]
)
def test_images_that_a_classifier_cannot_take_are_named(arch: str, side: int) -> None:
    with pytest.raises(
        ConfigError,
        match=f"model.arch={arch}: cannot take images of {side} x {side} pixels: [A-Zs]",
    ):
        model_of(TorchvisionConfig(arch=arch), (3, side, side), 10)


def test_network_whose_constructor_computes_can_be_built() -> None:
    """regnet's does; on the meta device it fails."""
    model = model_of(TorchvisionConfig(arch="regnet_y_400mf"), (3, 32, 32), 10)
    assert model.training and not any(tensor.is_meta for tensor in model.state_dict().values())


def test_weights_are_drawn_as_if_nothing_had_been_tried_before() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(3)
    expected = resnet18(num_classes=10).state_dict()
    torch.manual_seed(3)
    built = model_of(TorchvisionConfig(arch="resnet18"), (3, 32, 32), 10).state_dict()
    assert all(torch.equal(built[name], tensor) for name, tensor in expected.items())


def test_a_model_with_too_few_outputs_is_refused_in_words() -> None:
    with pytest.raises(
        DataError, match=r"outputs are of shape \[4, 2\], but the data set has 10 classes"
    ):
        Classification(10).sum_of_losses(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(
        DataError, match=r"outputs are of shape \[4, 2\], but the targets are of shape \[4\]"
    ):
        Regression().loss(nn.Identity(), (torch.zeros(4, 2), torch.zeros(4)))


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_that_no_output_stands_for_is_told(label: int) -> None:
    task = Classification()  # of a data set that does not say how many classes it has
    with pytest.raises(
        DataError, match=rf"outputs are of shape \[2, 3\], but the labels go from .*{label}"
    ):
        task.loss(nn.Identity(), (torch.zeros(2, 3), torch.tensor([1, label])))


class Pair(nn.Linear):
    """Two tensors in evaluation, as detection models and those with auxiliary outputs have them in
    training."""

    def forward(self, input: torch.Tensor) -> Any:
        if self.training:
            return super().forward(input)
        return (super().forward(input), input)


def test_a_model_with_two_outputs_is_told() -> None:
    module = ModelWithTask(Pair(4, 3), Classification(3), "cpu", None)
    images = torch.zeros(2, 4)
    labels = torch.zeros(2, dtype=torch.int64)
    module((images, labels))
    with pytest.raises(DataError, match="the model returns a tuple"):
        module.eval().score((images, labels))


def test_what_is_no_model_is_told() -> None:
    target = CustomModelConfig(target="collections.OrderedDict")
    with pytest.raises(ConfigError, match="an object of OrderedDict, which is not a"):
        build_user_model(target)
