"""Derivatives that torch's own operators have, and ours have not."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad


def only_backward() -> bool:
    """Whether nothing but a backward pass may be asked for.

    Our operators have no forward-mode derivatives, which would be 0 without a word, and no
    transforms of torch.func.
    """
    if torch.compiler.is_compiling():
        return True
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def once_differentiable(*_: Any) -> NoReturn:
    """Raise RuntimeError in place of the derivative of a gradient: there is none."""
    raise RuntimeError(
        "a kernel of tuning.triton_kernels has no second derivative; a task that needs one (a"
        " gradient penalty) runs with tuning.triton_kernels=false"
    )
