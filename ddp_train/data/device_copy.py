"""Small copies from the host to a device for which nobody waits."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a small tensor to a device without waiting, unless it is there already."""
    # From pageable memory the host would wait for all queued work.
    pinned = tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
    return pinned.to(device, non_blocking=True)
