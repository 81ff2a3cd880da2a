"""Image files in memory, decoded by PIL."""

from __future__ import annotations

import io
from typing import Any


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
