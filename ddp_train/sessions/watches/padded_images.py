"""Images that a detection model of torchvision pads to the largest one of its batch.

In a session that is the largest of this process's part, and padding changes what the model gives.
"""

from __future__ import annotations

import json
from math import ceil
from typing import Any

from torch import nn

from ddp_train.distributed.exchange import texts_from_all_ranks
from ddp_train.sessions.models import Models

PADDED = (
    "the model pads images to the largest one of its batch, which is each process's part of the"
    " global batch. So the result depends on the number of processes. Pad all images to one"
    " size: model.%s.size_divisible = %d"
)
TRANSFORM = "GeneralizedRCNNTransform"
STRIDE = 32
"""The multiple to which torchvision pads by itself."""


class PaddedImages:
    """The sizes to which images of the first step would be padded alone."""

    def __init__(self) -> None:
        self.name = ""
        """The name, in its model, of the layer that pads; "" if there is none."""
        self.one_size = 0
        """A multiple to which it pads images of all sizes alike."""
        self.sizes: set[tuple[int, int]] = set()
        self._handles: list[Any] = []

    def begin(self, models: Models) -> None:
        """Look at the layers that pad, from now on."""
        for model in models:
            for name, layer in model.module.named_modules():
                if type(layer).__name__ == TRANSFORM:
                    self.name = name
                    largest: Any = layer.max_size
                    self.one_size = ceil(largest / STRIDE) * STRIDE
                    self._handles.append(layer.register_forward_hook(self._see))

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _see(self, layer: nn.Module, _: Any, outputs: Any) -> None:
        images, _ = outputs
        multiple: Any = layer.size_divisible
        for height, width in images.image_sizes:
            self.sizes.add((ceil(height / multiple), ceil(width / multiple)))

    def warning(self, device: str) -> str:
        """What is to be said of the images of all processes; "" for nothing. A collective."""
        if not self.name:
            return ""
        of_ranks = texts_from_all_ranks(json.dumps(sorted(self.sizes)), device)
        sizes = {tuple(size) for text in of_ranks for size in json.loads(text)}
        if len(sizes) < 2:
            return ""
        return PADDED % (self.name, self.one_size)
