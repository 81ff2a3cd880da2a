"""Image files in memory, decoded by PIL."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


def decode_image(content: bytes) -> Any:
    """An image of PIL. Raises ValueError with the cause if the content is not one."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(content))
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        cause = str(error)
        if "<_io.BytesIO" in cause:
            cause = "no image format that PIL knows"
        raise ValueError(cause) from error
    return image


def pixels_of(image: Any) -> Tensor:
    """The pixels of an image of PIL, [channels, height, width]."""
    import torch  # late: a config may name a data set of this room before torch is needed

    pixels = torch.from_numpy(np.array(image))
    if pixels.ndim == 2:
        return pixels[None]
    return pixels.permute(2, 0, 1)
