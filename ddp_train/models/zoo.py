"""The networks. `build_model` fits any of them to a data set: its input shape and its number of
outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ddp_train.errors import ConfigError
from ddp_train.models.gpt.network import Gpt
from ddp_train.text import first_line


def build_model(name: str, input_shape: Sequence[int], outputs: int, **arguments: Any) -> nn.Module:
    """A built-in network that fits a data set. input_shape: of one sample; outputs: classes, or 1
    for a regression; arguments: those of its builder below, which are the keys of `model=NAME`.

    Raises ConfigError if a network cannot take such images.
    """
    return _BUILDERS[name](tuple(input_shape), outputs, **arguments)


def _cnn(
    shape: tuple[int, ...], outputs: int, channels: int, norm: str, dropout: float
) -> nn.Module:
    channels_in = shape[0]
    smallest_side = min(shape[1:])
    layers: list[nn.Module] = []
    while True:
        for _ in range(2):
            # A bias before a norm layer would be subtracted again by its mean.
            layers.append(nn.Conv2d(channels_in, channels, 3, padding=1, bias=norm == "none"))
            layers += {
                "none": [],
                "batch": [nn.BatchNorm2d(channels)],
                "group": [_group_norm(channels)],
            }[norm]
            layers.append(nn.ReLU(inplace=True))
            channels_in = channels
        layers.append(nn.MaxPool2d(2))
        smallest_side //= 2
        if smallest_side < 4:
            break
        channels *= 2
    # 2 x 2 places are left whatever the image size; adaptive pooling has no deterministic backward
    # pass on CUDA.
    layers += [_Quadrants(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels_in * 4, outputs)]
    return nn.Sequential(*layers)


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(next(groups for groups in (8, 4, 2, 1) if channels % groups == 0), channels)


class _Quadrants(nn.Module):
    """[n, c, h, w] -> [n, c, 4], the mean of each quadrant; they overlap in the middle where a side
    is odd."""

    def forward(self, images: Tensor) -> Tensor:
        height = (images.shape[2] + 1) // 2
        width = (images.shape[3] + 1) // 2
        rows = (images[:, :, :height], images[:, :, -height:])
        return torch.stack(
            [part.mean((2, 3)) for row in rows for part in (row[..., :width], row[..., -width:])],
            dim=2,
        )


def _mlp(
    shape: tuple[int, ...], outputs: int, hidden: int, layers: int, dropout: float
) -> nn.Module:
    def between() -> list[nn.Module]:
        return [nn.ReLU(inplace=True), *([nn.Dropout(dropout)] if dropout else [])]

    return _stack(shape, hidden, layers, outputs, between)


def _linear_regression(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(_features(shape), outputs))


def gelu(values: Tensor) -> Tensor:
    """The Gaussian error linear unit (arXiv:1606.08415), as the PyTorch tuning guide writes it
    ("Fuse operations").

    Eager torch runs one kernel, and reads and writes all values, for each of its five operations.
    """
    return values * 0.5 * (1.0 + torch.erf(values / 1.41421))


class _Gelu(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.function: Callable[[Tensor], Tensor] = torch.compile(gelu) if fused else gelu

    def forward(self, values: Tensor) -> Tensor:
        return self.function(values)


def _gelu_mlp(
    shape: tuple[int, ...], outputs: int, hidden: int, layers: int, fused: bool
) -> nn.Module:
    return _stack(shape, hidden, layers, outputs, lambda: [_Gelu(fused)])


def _stack(
    shape: tuple[int, ...],
    hidden: int,
    layers: int,
    outputs: int,
    between: Callable[[], list[nn.Module]],
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


def _torchvision(
    shape: tuple[int, ...], outputs: int, arch: str, weights: str | None = None
) -> nn.Module:
    """weights: with which it begins, `initial_weights.torchvision_weights`; some need other inputs
    then."""
    from torchvision.models import get_model

    more: dict[str, Any] = {"num_classes": outputs}
    if arch in ("googlenet", "inception_v3"):
        more |= {"aux_logits": False, "init_weights": True}  # one output, not three
        more["transform_input"] = (
            weights is not None
        )  # theirs are TensorFlow's, for another scale of pixels
    elif arch.startswith("vit_"):
        more["image_size"] = shape[1]
    try:
        network = get_model(arch, weights=None, **more)
        with torch.device("meta"):  # on tensors without content it costs some milliseconds
            state = {name: tensor.to("meta") for name, tensor in network.state_dict().items()}
            functional_call(network.eval(), state, torch.empty(2, 3, *shape[1:]))
    except (RuntimeError, AssertionError, ValueError) as error:
        what = f"cannot take images of {shape[1]} x {shape[2]} pixels: {first_line(error)}"
        raise ConfigError(
            [f"model.arch={arch}: {what}; use larger images, or another model.arch"]
        ) from error
    network.train()
    return nn.Sequential(_Rgb(), network) if shape[0] == 1 else network


class _Rgb(nn.Module):
    """Grey images as the three channels that torchvision's models expect."""

    def forward(self, images: Tensor) -> Tensor:
        return images.expand(-1, 3, -1, -1)


def _gpt(shape: tuple[int, ...], outputs: int, **arguments: Any) -> nn.Module:
    """The context is the length of a sample, the vocabulary that of the data. arguments: those of
    Gpt."""
    if len(shape) != 1:
        raise ConfigError(
            [f"model=gpt: takes tokens, [n, t], and an input has the shape {['n', *shape]}"]
        )
    return Gpt(outputs, shape[0], **arguments)


_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "cnn": _cnn,
    "mlp": _mlp,
    "linear_regression": _linear_regression,
    "gelu_mlp": _gelu_mlp,
    "gpt": _gpt,
    "torchvision": _torchvision,
}
"""For each built-in network a function of the shape of a sample, the outputs, and the keys of
`model=NAME`."""


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """The numbers that a model consists of: `all`, and those that are `trained`."""
    parameters = list(model.parameters())
    return {
        "all": sum(parameter.numel() for parameter in parameters),
        "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    }
