"""torchvision's classifiers, fitted to a data set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ddp_train.errors import ConfigError
from ddp_train.text import first_line


def build_torchvision(
    shape: tuple[int, ...], outputs: int, arch: str, weights: str | None = None
) -> nn.Module:
    """A classifier of torchvision.

    arch: its name there.
    weights: with which it begins, see `initial_weights.torchvision_weights`; some need other inputs
        then.

    Raises ConfigError if it cannot take such images.
    """
    from torchvision.models import get_model

    options: dict[str, Any] = {"num_classes": outputs}
    if arch in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": True}  # one output, not three
        # Their weights are TensorFlow's, for another scale of pixels.
        options["transform_input"] = weights is not None
    elif arch.startswith("vit_"):
        options["image_size"] = shape[1]
    try:
        network = get_model(arch, weights=None, **options)
        _try_images(network, shape)
    except (RuntimeError, AssertionError, ValueError) as error:
        problem = (
            f"model.arch={arch}: cannot take images of {shape[1]} x {shape[2]} pixels:"
            f" {first_line(error)}; use larger images, or another model.arch"
        )
        raise ConfigError([problem]) from error
    network.train()
    return nn.Sequential(_Rgb(), network) if shape[0] == 1 else network


def _try_images(network: nn.Module, shape: tuple[int, ...]) -> None:
    """Computes on tensors without content, which costs some milliseconds."""
    with torch.device("meta"):
        state = {name: tensor.to("meta") for name, tensor in network.state_dict().items()}
        functional_call(network.eval(), state, torch.empty(2, 3, *shape[1:]))


class _Rgb(nn.Module):
    """Grey images as the three channels that torchvision's models expect."""

    def forward(self, images: Tensor) -> Tensor:
        return images.expand(-1, 3, -1, -1)
