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

from ddp_train.models.put_back import leaving_nothing
from ddp_train.performance.flops import empty_batch, empty_copy, nothing_compiled
from ddp_train.tensor_tree import tensors

LAYERS = (
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    functional.linear,
)
"""Functions that take (input, weight, bias) and add the bias to each channel."""
NORMS = (nn.GroupNorm, nn.modules.batchnorm._NormBase)
log = logging.getLogger(__name__)


def biases_before_norm(model: nn.Module, inputs: Any) -> list[str] | None:
    """The names of the biases in a model that a norm layer subtracts again, in the order of the
    model's parameters.

    The norm layer takes the mean of each channel in training (batch norm, instance norm, group norm
    with a channel in each group), and nothing else uses what the bias is added to. If there are
    norm layers, a copy of the model runs on the meta device: nothing is computed and the model
    stays as it is.

    inputs: a batch, of which only the shapes matter.

    Returns None where that fails, as in a model that looks at values: the log says why.
    """
    if not any(isinstance(module, NORMS) for module in model.modules()):
        return []
    uses = TensorUses()
    try:
        empty, _ = empty_copy(model)
        empty.train()
        for module in empty.modules():
            if _subtracts_means(module):
                module.register_forward_pre_hook(uses.note_norm, with_kwargs=True)
        empty.eval()  # no exchange in batch norms over all processes
        unchanged = leaving_nothing("the look for biases", {"model": model}, on_copies=True)
        with torch.no_grad(), unchanged, nothing_compiled(), uses:
            results = empty(empty_batch(inputs))
    except Exception as error:  # noqa: BLE001  a model of anyone's may raise anything, and this is only advice
        log.info("biases before norm layers were not looked for: %r", error)
        return None
    uses.count(results)
    without_effect = uses.without_effect()
    return [
        name
        for name, bias in empty.named_parameters()
        if 0 < uses.counts[id(bias)] == without_effect[id(bias)]
    ]


def _subtracts_means(module: nn.Module) -> bool:
    """Whether it is a norm layer that, in training, subtracts the mean of each channel."""
    if isinstance(module, nn.GroupNorm):
        return module.num_groups == module.num_channels
    return module.training and isinstance(module, nn.modules.batchnorm._NormBase)


class TensorUses(TorchFunctionMode):
    """Notes which tensors are made by adding a bias, and how often each tensor is used.

    Tensors are known by their id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()
        """Number of uses of each tensor."""
        self.biases: dict[int, int] = {}
        """Results of LAYERS, and their biases."""
        self.normed: set[int] = set()
        """Inputs of norm layers that subtract means."""
        self.kept: list[Any] = []
        """All that was seen, so that no id comes twice."""

    def count(self, used: Any) -> None:
        self.counts.update(id(tensor) for tensor in tensors(used))

    def without_effect(self) -> Counter[int]:
        """Number of uses of each bias in a result that a norm layer alone uses."""
        return Counter(
            bias
            for result, bias in self.biases.items()
            if result in self.normed and self.counts[result] == 1
        )

    def note_norm(self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A hook before a norm layer."""
        self.normed.update(id(tensor) for tensor in tensors([*inputs, *named.values()]))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        inputs = [*args, *named.values()]
        result = func(*args, **named)
        self.kept += [inputs, result]
        if any(True for _ in tensors(result)):  # not its shape, for example
            self.count(inputs)
        bias = args[2] if len(args) > 2 else named.get("bias")
        if func in LAYERS and isinstance(bias, Tensor):
            self.biases[id(result)] = id(bias)
        return result
