"""Biases that have no effect, because a norm layer directly behind subtracts them again.

PyTorch tuning guide, "Disable bias for convolutions directly followed by a batch norm": such a bias
costs memory, a kernel in the backward pass and its part of the gradient exchange.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ddp_train.data.rng import keyed_generators
from ddp_train.performance.flops import empty_copy, nothing_compiled
from ddp_train.tensor_tree import map_tensors, tensors

LAYERS = (
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    functional.linear,
)
"""What takes (input, weight, bias) and adds the bias to each channel."""
NORMS = (nn.GroupNorm, nn.modules.batchnorm._NormBase)
log = logging.getLogger(__name__)


def biases_before_norm(model: nn.Module, inputs: Any) -> list[str] | None:
    """The names of the biases in a model that a norm layer subtracts again, in the order of the
    model's parameters.

    The norm layer takes the mean of each channel in training (batch norm, instance norm, group norm
    with a channel in each group), and nothing else uses what the bias is added to. inputs: a batch,
    of which only the shapes matter. A copy of the model runs, if there are norm layers, on the meta
    device: nothing is computed and the model stays as it is. None where that fails, as in a model
    that looks at values: the log says why.
    """
    if not any(isinstance(module, NORMS) for module in model.modules()):
        return []
    watch = _Watch()
    try:
        shapes, _ = empty_copy(model)
        shapes.train()
        for module in shapes.modules():
            if _subtracts_means(module):
                module.register_forward_pre_hook(watch.norm, with_kwargs=True)
        shapes.eval()  # no exchange in batch norms over all processes
        with torch.no_grad(), keyed_generators(), nothing_compiled(), watch:
            results = shapes(
                map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), inputs)
            )
    except Exception as error:  # noqa: BLE001  a model of anyone's may raise anything, and this is only advice
        log.info("the model was not looked through for biases before norm layers: %r", error)
        return None
    watch.uses.update(id(tensor) for tensor in tensors(results))
    idle = Counter(
        bias
        for result, bias in watch.biased.items()
        if result in watch.normed and watch.uses[result] == 1
    )
    return [
        name
        for name, bias in shapes.named_parameters()
        if 0 < watch.uses[id(bias)] == idle[id(bias)]
    ]


def _subtracts_means(module: nn.Module) -> bool:
    """Whether it is a norm layer that, in training, subtracts the mean of each channel."""
    if isinstance(module, nn.GroupNorm):
        return module.num_groups == module.num_channels
    return module.training and isinstance(module, nn.modules.batchnorm._NormBase)


class _Watch(TorchFunctionMode):
    """Which tensors are made by adding a bias, and how often each tensor is used. Tensors are known
    by their id."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: Counter[int] = Counter()
        self.biased: dict[int, int] = {}
        """The result of a layer: its bias."""
        self.normed: set[int] = set()
        self.kept: list[Any] = []
        """All that was seen, so that no id comes twice."""

    def norm(self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Called before a norm layer."""
        self.normed.update(id(tensor) for tensor in tensors([*given, *named.values()]))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        result = func(*args, **(kwargs or {}))
        self.kept += [given, result]
        if any(True for _ in tensors(result)):  # not its shape, for example
            self.uses.update(id(tensor) for tensor in tensors(given))
        bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
        if func in LAYERS and isinstance(bias, Tensor):
            self.biased[id(result)] = id(bias)
        return result
