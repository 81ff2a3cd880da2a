"""The networks. `build_model` fits any of them to a data set: its input shape and its number of outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.config.user_code import instantiate
from ddp_train.errors import ConfigError
from ddp_train.text import first_line


def build_model(model: Any, input_shape: Sequence[int], outputs: int) -> nn.Module:
    """The model of a section of the config. input_shape: of one sample; outputs: classes, or 1 for a regression.

    Raises ConfigError if a network cannot take such images.
    """
    return _BUILDERS[model.name](model, tuple(input_shape), outputs)


def _cnn(model: Any, shape: tuple[int, ...], outputs: int) -> nn.Module:
    channels_in, smallest_side = shape[0], min(shape[1:])
    layers: list[nn.Module] = []
    channels = model.channels
    while True:
        for _ in range(2):
            # A bias before a norm layer would be subtracted again by its mean.
            layers.append(nn.Conv2d(channels_in, channels, 3, padding=1, bias=model.norm == "none"))
            layers += {"none": [], "batch": [nn.BatchNorm2d(channels)], "group": [_group_norm(channels)]}[model.norm]
            layers.append(nn.ReLU(inplace=True))
            channels_in = channels
        layers.append(nn.MaxPool2d(2))
        smallest_side //= 2
        if smallest_side < 4:
            break
        channels *= 2
    # 2 x 2 places are left whatever the image size; adaptive pooling has no deterministic backward pass on CUDA.
    layers += [_Quadrants(), nn.Flatten(), nn.Dropout(model.dropout), nn.Linear(channels_in * 4, outputs)]
    return nn.Sequential(*layers)


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(next(groups for groups in (8, 4, 2, 1) if channels % groups == 0), channels)


class _Quadrants(nn.Module):
    """[n, c, h, w] -> [n, c, 4], the mean of each quadrant; they overlap in the middle where a side is odd."""

    def forward(self, images: Tensor) -> Tensor:
        height, width = (images.shape[2] + 1) // 2, (images.shape[3] + 1) // 2
        rows = (images[:, :, :height], images[:, :, -height:])
        return torch.stack([part.mean((2, 3)) for row in rows for part in (row[..., :width], row[..., -width:])], dim=2)


def _mlp(model: Any, shape: tuple[int, ...], outputs: int) -> nn.Module:
    def between() -> list[nn.Module]:
        return [nn.ReLU(inplace=True), *([nn.Dropout(model.dropout)] if model.dropout else [])]

    return _stack(shape, model.hidden, model.layers, outputs, between)


def _linear_regression(model: Any, shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(_features(shape), outputs))


def gelu(values: Tensor) -> Tensor:
    """The Gaussian error linear unit (arXiv:1606.08415), as the PyTorch tuning guide writes it ("Fuse operations").

    Eager torch runs one kernel, and reads and writes all values, for each of its five operations.
    """
    return values * 0.5 * (1.0 + torch.erf(values / 1.41421))


def _custom(model: Any) -> nn.Module:
    made = instantiate("model", model)
    if not isinstance(made, nn.Module):
        kind = type(made).__name__
        raise ConfigError([f"model._target_={model.target}: made an object of {kind}, which is no torch.nn.Module"])
    return made


class _Gelu(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.function: Callable[[Tensor], Tensor] = torch.compile(gelu) if fused else gelu

    def forward(self, values: Tensor) -> Tensor:
        return self.function(values)


def _gelu_mlp(model: Any, shape: tuple[int, ...], outputs: int) -> nn.Module:
    return _stack(shape, model.hidden, model.layers, outputs, lambda: [_Gelu(model.fused)])


def _stack(
    shape: tuple[int, ...], hidden: int, layers: int, outputs: int, between: Callable[[], list[nn.Module]]
) -> nn.Module:
    """Linear layers with something between them."""
    modules: list[nn.Module] = [nn.Flatten()]
    features = _features(shape)
    for _ in range(layers):
        modules += [nn.Linear(features, hidden), *between()]
        features = hidden
    return nn.Sequential(*modules, nn.Linear(features, outputs))


def _features(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _torchvision(model: Any, shape: tuple[int, ...], outputs: int) -> nn.Module:
    from torchvision.models import get_model

    more: dict[str, Any] = {"num_classes": outputs}
    if model.arch in ("googlenet", "inception_v3"):
        more |= {"aux_logits": False, "init_weights": True}  # one output, not three
    elif model.arch.startswith("vit_"):
        more["image_size"] = shape[1]
    try:  # on tensors without content: it costs some milliseconds
        with torch.device("meta"):
            get_model(model.arch, weights=None, **more).eval()(torch.empty(2, 3, *shape[1:]))
    except (RuntimeError, AssertionError, ValueError) as error:
        what = f"cannot take images of {shape[1]} x {shape[2]} pixels: {first_line(error)}"
        raise ConfigError([f"model.arch={model.arch}: {what}"]) from error
    network = get_model(model.arch, weights=None, **more)
    return nn.Sequential(_Rgb(), network) if shape[0] == 1 else network


class _Rgb(nn.Module):
    """Grey images as the three channels that torchvision's models expect."""

    def forward(self, images: Tensor) -> Tensor:
        return images.expand(-1, 3, -1, -1)


_BUILDERS: dict[str, Callable[[Any, tuple[int, ...], int], nn.Module]] = {
    "cnn": _cnn,
    "mlp": _mlp,
    "linear_regression": _linear_regression,
    "gelu_mlp": _gelu_mlp,
    "torchvision": _torchvision,
    "custom": lambda model, shape, outputs: _custom(model),
}
