"""Biases that a norm layer subtracts again are named, and no others."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.data.rng import global_states
from ddp_train.performance.bias_lint import biases_before_norm


class Uses(nn.Module):
    """A convolution and a norm layer, put to use by a function."""

    def __init__(self, function: Callable[[nn.Module, nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.function = function

    def forward(self, images: Tensor) -> Tensor:
        return self.function(self.layer, self.norm, images)


class Activated(nn.Conv2d):
    """A convolution by its class, and something else by what it returns."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Frozen(nn.BatchNorm2d):
    """Never trains: it subtracts the mean of other samples."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def conv(**more: bool) -> nn.Conv2d:
    return nn.Conv2d(4, 4, 1, **more)


def residual(layer: nn.Module, norm: nn.Module, images: Tensor) -> Tensor:
    between = layer(images)
    return between + norm(between)


CASES: dict[str, tuple[nn.Module, list[str]]] = {
    "batch norm": (nn.Sequential(conv(), nn.BatchNorm2d(4)), ["0.bias"]),
    "twice": (
        nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv(), nn.SyncBatchNorm(4)),
        ["0.bias", "3.bias"],
    ),
    "linear": (nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5)), ["1.bias"]),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(4, 3, 2), nn.BatchNorm2d(3)), ["0.bias"]),
    "instance norm": (nn.Sequential(conv(), nn.InstanceNorm2d(4)), ["0.bias"]),
    "groups of one": (nn.Sequential(conv(), nn.GroupNorm(4, 4)), ["0.bias"]),
    "functional": (
        Uses(lambda layer, norm, x: norm(functional.conv2d(x, layer.weight, bias=layer.bias))),
        ["layer.bias"],
    ),
    "no bias": (nn.Sequential(conv(bias=False), nn.BatchNorm2d(4)), []),
    "groups of two": (nn.Sequential(conv(), nn.GroupNorm(2, 4)), []),
    "layer norm": (nn.Sequential(conv(), nn.LayerNorm([4, 3, 3])), []),
    "activation between": (nn.Sequential(conv(), nn.ReLU(), nn.BatchNorm2d(4)), []),
    "activation in place": (nn.Sequential(conv(), nn.ReLU(inplace=True), nn.BatchNorm2d(4)), []),
    "activation inside": (nn.Sequential(Activated(4, 4, 1), nn.BatchNorm2d(4)), []),
    "frozen": (nn.Sequential(conv(), Frozen(4)), []),
    "residual": (Uses(residual), []),
    "shared": (Uses(lambda layer, norm, images: layer(norm(layer(images)))), []),
    "norm first": (nn.Sequential(nn.BatchNorm2d(4), conv()), []),
    "by name": (Uses(lambda layer, norm, images: norm(input=layer(images))), ["layer.bias"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_named_has_no_effect_and_the_rest_has(name: str) -> None:
    model, expected = CASES[name]
    torch.manual_seed(0)
    images = torch.randn(5, 4, 3, 3)
    mode = {module: module.training for module in model.modules()}
    assert biases_before_norm(model, images[:1]) == expected
    assert mode == {module: module.training for module in model.modules()}
    if name == "twice":  # torch refuses SyncBatchNorm on the CPU
        model[4] = nn.BatchNorm2d(4)
    model.train()
    with torch.no_grad():
        for bias_name, bias in model.named_parameters():
            if bias_name.endswith("bias"):
                before = model(images)
                bias += torch.linspace(0.5, 2.0, len(bias.flatten())).view_as(bias)
                same = torch.allclose(before, model(images), atol=1e-4)
                assert same == (bias_name in expected), bias_name


def test_opaque_model_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Uses(lambda layer, norm, images: norm(layer(images)) * images.sum().item())
    with caplog.at_level("INFO"):
        assert biases_before_norm(model, torch.ones(1, 4, 3, 3)) is None
    assert "biases before norm layers were not looked for" in caplog.text


def test_looking_through_a_model_draws_no_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    def draw(layer: nn.Module, norm: nn.Module, images: Tensor) -> Tensor:
        print("drawn", random.random())
        return norm(layer(images))

    model = Uses(draw)
    before = global_states()
    assert biases_before_norm(model, torch.ones(1, 4, 3, 3)) == ["layer.bias"]
    assert "drawn" in capsys.readouterr().out and global_states() == before


@pytest.mark.parametrize(
    "arch",
    [
        "alexnet",
        "convnext_tiny",
        "efficientnet_b0",
        "googlenet",
        "mobilenet_v3_small",
        "resnet50",
        "swin_t",
        "vgg11",
        "vit_b_16",
    ],
)
@pytest.mark.slow
def test_no_false_alarm(arch: str, caplog: pytest.LogCaptureFixture) -> None:
    from torchvision.models import get_model

    with torch.device("meta"), caplog.at_level("INFO"):
        model = get_model(
            arch, **({"aux_logits": False, "init_weights": False} if arch == "googlenet" else {})
        )
        assert biases_before_norm(model, torch.empty(1, 3, 224, 224)) == []
    assert caplog.text == ""


def test_vgg_with_batch_norm_has_one_for_each_convolution() -> None:
    """torchvision's, as it is."""
    from torchvision.models import vgg11_bn

    with torch.device("meta"):
        model = vgg11_bn()
    convolutions = [
        f"{name}.bias" for name, module in model.named_modules() if isinstance(module, nn.Conv2d)
    ]
    assert biases_before_norm(model, torch.empty(1, 3, 224, 224)) == convolutions
    assert len(convolutions) == 8
